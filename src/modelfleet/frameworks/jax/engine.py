"""What one JAX model does as a member of a lane, as pure functions; and the engine made of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.frameworks.functional import Definition, FunctionalEngine, Programs, State
from modelfleet.frameworks.jax.backend import JaxBackend, shapes
from modelfleet.frameworks.jax.losses import check_range, check_targets
from modelfleet.frameworks.jax.models import Parts, Tree, as_numpy, form_of, key_data, key_of
from modelfleet.frameworks.jax.structure import signature
from modelfleet.frameworks.jax.task import PRECISIONS, Task, widened
from modelfleet.members import Member

_MOST_PROGRAMS = 64
_programs: dict[Any, Programs] = {}  # those used last are at the end


def engine(
    members: Sequence[Member],
    task: Task,
    columns: Mapping[str, np.ndarray],
    device: jax.Device,
    *,
    fused: bool,
    programs: Programs | None = None,
) -> FunctionalEngine:
    """The engine of a lane of JAX models. There are no columns: each member's numbers are in its state."""
    definition = JaxDefinition(members[0].model, task)
    if programs is None:
        # For all fleets of a process: what was compiled in one serves the next of the same structure and task.
        key = (signature(members[0].model), task, device, fused)
        programs = _programs.pop(key, None) or Programs(definition, JaxBackend(device), fused=fused)
        _programs[key] = programs
        while len(_programs) > _MOST_PROGRAMS:
            _programs.pop(next(iter(_programs)))
    return FunctionalEngine(members, definition, programs.backend, fused=fused, programs=programs)


class JaxDefinition(Definition):
    """One member's steps (see `functional.Definition`)."""

    def __init__(self, model: Any, task: Task) -> None:
        self.task = task
        self._form = form_of(model)
        self._slots: Tree | None = None
        self._fresh: dict[str, np.ndarray] = {}
        self.maskable = False  # until `try_out` has seen what the loss gives

    def state(self, member: Member) -> State:
        """A member's params, buffers and slots; and its random key, and where its gradient is clipped."""
        params, buffers = self._form.parts(member.model)
        own = self.task.own.get(member.name, {})
        key = {"key": key_data(member.seed)}
        clip = {"clip_norm": np.float32(own.get("clip_norm", np.inf))} if self.task.clip else {}
        state = {"params": as_numpy(params), "buffers": as_numpy(buffers), "slots": {}, "member": key | clip}
        if self.task.optimizer is not None and params:
            slots = self.task.optimizer.state(self._form.tree(params), own)
            self._slots = self._slots or Tree(slots)
            state["slots"] = as_numpy(self._slots.parts(slots))
        return state

    def try_out(self, state: State, batch: Any) -> None:
        """Run a member on a few rows without computing anything, and see what there is to sum up."""
        self.maskable = self._tells_rows(state, batch) and all(m.maskable for m in self.task.metrics)
        for train in (True, False):
            _, found = shapes(lambda s, b, train=train: self._losses(s, b, None, train)[0], state, batch)
        self._fresh = {
            f"{name}/{key}": np.asarray(value)
            for name, parts in found.items()
            for key, value in self.task.metric(name).begun(parts).items()
        }

    def fresh_metrics(self) -> Parts:
        """A member's accumulators at the beginning of an epoch."""
        return self._fresh

    def train(self, state: State, hyper: Any, batch: Any, weights: Any) -> tuple[State, Any, Any]:
        """One step."""
        import optax

        assert self.task.optimizer is not None
        assert self._slots is not None

        def loss_of(params: Parts) -> Any:
            (loss, found), after = self._losses({**state, "params": params}, batch, weights, True)
            return loss, (found, after)

        (loss, (found, after)), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        finite = jnp.isfinite(sum((g * 0).sum() for g in gradients.values()))
        if self.task.clip:
            gradients = _clipped(gradients, state["member"]["clip_norm"])
        # A forward may change weights itself, as nnx.SpectralNorm does: these are what the optimizer steps.
        params, slots = self._form.tree(after["params"]), self._slots.tree(state["slots"])

        def value_of(tree: Any) -> Any:
            return loss_of(self._form.flat(tree))[0]

        # Some transformations go by the loss: Polyak's steps, the plateau's; and those that search along a line.
        tree = self._form.tree(gradients)
        extra = self.task.optimizer.taken(value=loss, grad=tree, value_fn=value_of)
        updates, slots = self.task.optimizer.transformation.update(tree, slots, params, **extra)
        new = {
            "params": self._form.flat(optax.apply_updates(params, updates)),
            "buffers": after["buffers"],
            "slots": self._slots.parts(slots),
        }
        kept: State = {part: _as_before(tensors, state[part]) for part, tensors in new.items()}
        kept["metrics"] = self._added(state["metrics"], found)
        return kept, jnp.isfinite(loss), finite

    def evaluate(self, state: State, metrics: Parts, batch: Any, weights: Any) -> tuple[Parts, State]:
        """The accumulators with a batch added."""
        (_, found), after = self._losses(state, batch, weights, False)
        return self._added(metrics, found), _changed(after, state)

    def results(self, metrics: Parts) -> Parts:
        """The loss and the metrics from their accumulators."""
        found = _by_metric(metrics)
        order = [name for name in ("loss", *(m.name for m in self.task.metrics)) if name in found]
        return {name: self.task.metric(name).value(found[name]) for name in dict.fromkeys([*order, *found])}

    def predict(self, state: State, x: Any) -> tuple[Any, State]:
        """The outputs on inputs."""
        x = self._cast(x)
        call = self._form.call
        outputs, after = self._run(state, False, lambda model: widened(call(model, x), self.task.precision))
        return outputs, _changed(after, state)

    def write_back(self, member: Member, state: State) -> None:
        """Put a member's arrays into its module, or make a new pair of them."""
        member.model = self._form.write_back(member.model, state["params"], state["buffers"])

    def check_targets(self, output_shape: tuple[int, ...], target: Any, name: str | None) -> None:
        """Refuse targets that the loss can't take."""
        if self.task.loss is not None and hasattr(target, "shape"):
            check_targets(self.task.loss, output_shape, target, name)

    def label_check(self, output_shape: tuple[int, ...]) -> Callable[[Any], None] | None:
        """A function that refuses a batch with targets out of range."""
        loss = self.task.loss
        if loss is None:
            return None

        def check(batch: Any) -> None:
            if isinstance(batch, tuple) and len(batch) == 2 and hasattr(batch[1], "shape"):
                check_range(loss, output_shape, batch[1])

        return check

    def _losses(self, state: State, batch: Any, weights: Any, train: bool) -> Any:
        """(loss, parts of the metrics), and the params and buffers afterwards."""
        if self.task.loss is not None and isinstance(batch, tuple) and len(batch) == 2:
            batch = self._cast(batch[0]), batch[1]
        else:
            batch = self._cast(batch)
        return self._run(state, train, lambda model: self.task.run(self._form.call, model, batch, weights))

    def _run(self, state: State, train: bool, use: Callable[[Any], Any]) -> tuple[Any, State]:
        member = state["member"]
        key = jax.random.fold_in(key_of(member["key"]), member["step"])
        given = self._cast(state["params"])
        result, params, buffers = self._form.run(given, state["buffers"], key, use, train=train)
        # Of those that it left alone, what was there before they were cast.
        kept = {
            name: before if params[name] is given[name] else params[name].astype(before.dtype)
            for name, before in state["params"].items()
        }
        return result, {"params": kept, "buffers": buffers}

    def _cast(self, tree: Any) -> Any:
        """A tree in the precision to compute in; weights and their updates stay in float32."""
        dtype = PRECISIONS[self.task.precision]
        if dtype is None:
            return tree
        return jax.tree.map(lambda a: a.astype(dtype) if a.dtype == jnp.float32 else a, tree)

    def _added(self, metrics: Parts, found: Mapping[str, Parts]) -> Parts:
        before = _by_metric(metrics)
        return {
            f"{name}/{key}": value
            for name, parts in found.items()
            for key, value in self.task.metric(name).joined(before[name], parts).items()
        }

    def _tells_rows(self, state: State, batch: Any) -> bool:
        """Whether the loss is told row by row."""
        loss = self.task.loss
        if loss is None or not (isinstance(batch, tuple) and len(batch) == 2):
            return False

        def counted(state: State, batch: Any) -> Any:
            return loss.rows(self.predict(state, batch[0])[0], batch[1])[1]

        return shapes(counted, state, batch) is not None


def _by_metric(metrics: Parts) -> dict[str, Parts]:
    found: dict[str, Parts] = {}
    for path, value in metrics.items():
        name, _, key = path.rpartition("/")
        found.setdefault(name, {})[key] = value
    return found


def _clipped(gradients: Parts, most: Any) -> Parts:
    # As optax.clip_by_global_norm does it.
    norm = jnp.sqrt(sum((g**2).sum() for g in gradients.values()))
    return {key: jnp.where(norm < most, g, g / norm * most) for key, g in gradients.items()}


def _changed(after: State, before: State) -> State:
    """Those of the params and buffers that a model has put others in the place of."""
    return {
        part: _as_before({name: own[name] for name in own if own[name] is not before[part][name]}, before[part])
        for part, own in after.items()
    }


def _as_before(new: Parts, old: Parts) -> Parts:
    """The new tensors in the dtypes of the old: a step never changes what a member is made of."""
    return {key: jnp.asarray(value, old[key].dtype) for key, value in new.items()}

"""Steps of one JAX model as a member of a lane, as pure functions."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.frameworks.batch_parts import check_weights, has_target
from modelfleet.frameworks.engine import Hyper
from modelfleet.frameworks.functional import Definition, State
from modelfleet.frameworks.jax.backend import shapes
from modelfleet.frameworks.jax.models import Parts, TreeLayout, as_numpy, form_of, key_data, key_of
from modelfleet.frameworks.jax.target_checks import check_range, check_targets
from modelfleet.frameworks.jax.task import PRECISIONS, Task, widened
from modelfleet.members import Member
from modelfleet.types import Arrays, Model, Tensor, Tree


class JaxDefinition(Definition):
    """Steps of one member (see `functional.Definition`)."""

    def __init__(self, model: Model, task: Task) -> None:
        self.task = task
        self.model = model
        self.form = form_of(model)
        self._slots: TreeLayout | None = None
        self._fresh: Arrays = {}
        self.can_mask_rows = False  # until `try_out` has seen what the loss returns

    def go_on(self, other: "JaxDefinition") -> None:
        """Take over the results of the trials of another definition, whose task may have another optimizer."""
        if self.task.optimizer == other.task.optimizer:
            self._slots = self._slots or other._slots
        self._fresh = self._fresh or other._fresh
        self.can_mask_rows = self.can_mask_rows or other.can_mask_rows

    def learn(self, member: Member) -> None:
        """Learn the form of the optimizer's state from a member, if it is not known yet."""
        if self._slots is None:
            self.state(member)

    def state(self, member: Member) -> State:
        """Return a member's params, buffers and optimizer state, its random key, and its clip norm."""
        params, buffers = self.form.parts(member.model)
        own = self.task.own.get(member.name, {})
        key = {"key": key_data(member.seed)}
        clip = (
            {"clip_norm": jax.dtypes.canonicalize_dtype(np.float64).type(own.get("clip_norm", np.inf))}
            if self.task.clip
            else {}
        )
        state = {"params": as_numpy(params), "buffers": as_numpy(buffers), "optimizer": {}, "member": key | clip}
        state["numbers"] = {"variant": np.int32(0)}  # members may become unlike in a fit
        if self.task.optimizer is not None and params:
            slots = self.task.optimizer.state(self.form.tree(params), own)
            self._slots = self._slots or TreeLayout(slots)
            state["optimizer"] = as_numpy(self._slots.parts(slots))
        return state

    def try_out(self, state: State, batch: Tree) -> None:
        """Trace a member on a few rows without computing anything, and find out which metrics there are."""
        by_row = self._has_loss_by_row(state, batch)
        self.can_mask_rows = by_row and all(metric.can_mask_rows for metric in self.task.metrics)
        for train in (True, False):
            _, found = shapes(lambda s, b, train=train: self._losses(s, b, None, train)[0], state, batch)
        self._fresh = {
            f"{name}/{key}": np.asarray(value)
            for name, parts in found.items()
            for key, value in self.task.metric(name).begun(parts).items()
        }

    def fresh_metrics(self) -> Arrays:
        """Return a member's metrics before the first batch."""
        return self._fresh

    def train(
        self, state: State, hyper: Hyper, batch: Tree, weights: Tensor | None
    ) -> tuple[State, Tensor, Tensor]:
        """Return what `apply` returns after a whole step."""
        loss_of = self._loss_of(state, batch, weights)
        found = self.gradients(state, batch, weights)
        return self.apply(state, hyper, found, lambda tree: loss_of(self.form.flat(tree))[0])

    def apply(
        self, state: State, hyper: Hyper, found: dict[str, Tree], value_of: Callable[[Tree], Tensor] | None = None
    ) -> tuple[State, Tensor, Tensor]:
        """Return the state after an update by what `gradients` returned.

        `value_of` returns the loss on the same batch for other params, for optimizers that search along a line.
        """
        import optax

        assert self.task.optimizer is not None
        assert self._slots is not None
        loss, gradients = found["loss"], found["gradients"]
        finite = jnp.isfinite(sum((g * 0).sum() for g in gradients.values()))
        if self.task.clip:
            gradients = _clipped(gradients, state["member"]["clip_norm"])
        # A forward pass may change weights itself, like nnx.SpectralNorm. The optimizer steps the changed weights.
        params, slots = self.form.tree(found["params"]), self._slots.tree(state["optimizer"])
        # Some transformations need the loss: Polyak's steps, reducing on a plateau, line searches.
        tree = self.form.tree(gradients)
        extra = self.task.optimizer.taken(value=loss, grad=tree, value_fn=value_of)
        updates, slots = self.task.optimizer.transformation.update(tree, slots, params, **extra)
        new = {
            "params": self.form.flat(optax.apply_updates(params, updates)),
            "buffers": found["buffers"],
            "optimizer": self._slots.parts(slots),
        }
        kept: State = {part: _as_before(tensors, state[part]) for part, tensors in new.items()}
        kept["metrics"] = found["metrics"]
        return kept, loss, finite

    def gradients(self, state: State, batch: Tree, weights: Tensor | None) -> dict[str, Tree]:
        """Return what `apply` needs to finish a step on a batch."""
        loss_of = self._loss_of(state, batch, weights)
        (loss, (found, after)), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        return {**after, "loss": loss, "gradients": gradients, "metrics": self._added(state["metrics"], found)}

    def _loss_of(
        self, state: State, batch: Tree, weights: Tensor | None
    ) -> Callable[[Parts], tuple[Tensor, Tree]]:
        def loss_of(params: Parts) -> tuple[Tensor, Tree]:
            (loss, found), after = self._losses({**state, "params": params}, batch, weights, True)
            return loss, (found, after)

        return loss_of

    def evaluate(self, state: State, metrics: Parts, batch: Tree, weights: Tensor | None) -> tuple[Parts, State]:
        """Return the metrics with a batch added, and what the model has changed."""
        (_, found), after = self._losses(state, batch, weights, False)
        return self._added(metrics, found), _changed(after, state)

    def results(self, metrics: Parts) -> Parts:
        """Return the values of the loss and the metrics."""
        found = _by_metric(metrics)
        order = [name for name in ("loss", *(m.name for m in self.task.metrics)) if name in found]
        return {name: self.task.metric(name).value(found[name]) for name in dict.fromkeys([*order, *found])}

    def predict(self, state: State, x: Tree) -> tuple[Tree, State]:
        """Return the outputs on inputs, and what the model has changed."""
        x = self._cast(x)
        call = self.form.call
        outputs, after = self._run(state, False, lambda model: widened(call(model, x), self.task.precision))
        return outputs, _changed(after, state)

    def write_back(self, member: Member, state: State) -> None:
        """Copy a member's arrays into its module, or make a new pair of them."""
        member.model = self.form.write_back(member.model, state["params"], state["buffers"])

    def check_targets(self, output_shape: tuple[int, ...], target: Tensor, name: str | None) -> None:
        """Raise InputError for targets that the loss can't take."""
        if self.task.loss is not None and hasattr(target, "shape"):
            check_targets(self.task.loss, output_shape, target, name)

    def label_check(self, output_shape: tuple[int, ...]) -> Callable[[Tree], None] | None:
        """Return a function that raises for a batch with targets or weights out of range."""
        loss = self.task.loss
        if loss is None:
            return None

        def check(batch: Tree) -> None:
            if has_target(batch) and hasattr(batch[1], "shape"):
                check_range(loss, output_shape, batch[1])
            if has_target(batch) and len(batch) == 3:
                check_weights(np.asarray(batch[2]))

        return check

    def _losses(self, state: State, batch: Tree, weights: Tensor | None, train: bool) -> tuple[Tree, State]:
        """Return (loss, parts of the metrics), and the params and buffers afterwards."""
        if self.task.loss is not None and has_target(batch):
            batch = self._cast(batch[0]), *batch[1:]
        else:
            batch = self._cast(batch)
        return self._run(state, train, lambda model: self.task.run(self.form.call, model, batch, weights))

    def _run(self, state: State, train: bool, use: Callable[[Model], Tree]) -> tuple[Tree, State]:
        member = state["member"]
        key = jax.random.fold_in(key_of(member["key"]), member["step"])
        given = self._cast(state["params"])
        result, params, buffers = self.form.run(given, state["buffers"], key, use, train=train)
        # Weights that the model did not change keep the value from before the cast.
        kept = {
            name: before if params[name] is given[name] else params[name].astype(before.dtype)
            for name, before in state["params"].items()
        }
        return result, {"params": kept, "buffers": buffers}

    def _cast(self, tree: Tree) -> Tree:
        """Return a tree in the precision to compute in. Weights and their updates stay in float32."""
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

    def _has_loss_by_row(self, state: State, batch: Tree) -> bool:
        """Return True if the loss is known for each row."""
        loss = self.task.loss
        if loss is None or not has_target(batch):
            return False

        _, counts = shapes(lambda s, b: loss.rows(self.predict(s, b[0])[0], b[1]), state, batch)
        return counts is not None


def _by_metric(metrics: Parts) -> dict[str, Parts]:
    found: dict[str, Parts] = {}
    for path, value in metrics.items():
        name, _, key = path.rpartition("/")
        found.setdefault(name, {})[key] = value
    return found


def _clipped(gradients: Parts, most: Tensor) -> Parts:
    # As optax.clip_by_global_norm does it.
    norm = jnp.sqrt(sum((g**2).sum() for g in gradients.values()))
    return {
        key: jnp.where(norm < most.astype(norm.dtype), g, g / norm * most.astype(g.dtype))
        for key, g in gradients.items()
    }


def _changed(after: State, before: State) -> State:
    """Return the params and buffers that a model has replaced."""
    return {
        part: _as_before({name: own[name] for name in own if own[name] is not before[part][name]}, before[part])
        for part, own in after.items()
    }


def _as_before(new: Parts, old: Parts) -> Parts:
    """Return the new tensors in the dtypes of the old: a step never changes a dtype."""
    return {key: jnp.asarray(value, old[key].dtype) for key, value in new.items()}

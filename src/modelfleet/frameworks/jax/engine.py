"""What one JAX model does as a member of a lane, as pure functions; and the engine made of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.errors import StrategyError
from modelfleet.frameworks.functional import Definition, FunctionalEngine, Programs, State
from modelfleet.frameworks.jax.backend import JaxBackend, shapes
from modelfleet.frameworks.jax.losses import check_range, check_targets
from modelfleet.frameworks.jax.models import Parts, Tree, as_numpy, form_of, key_data, key_of
from modelfleet.frameworks.jax.structure import difference, is_module, signature, statics
from modelfleet.frameworks.jax.task import PRECISIONS, Task, widened
from modelfleet.frameworks.protocol import CannotFuseError
from modelfleet.frameworks.reads import Reads
from modelfleet.frameworks.stacked import Positions
from modelfleet.members import Member
from modelfleet.trees import map_tree

_MOST_PROGRAMS = 64
_MOST_LOOKED_AT = 256  # members of a lane whose modules are looked at before each epoch
_programs: dict[Any, Programs] = {}  # those used last are at the end


class Engine(FunctionalEngine):
    """The engine of a lane of JAX models. There are no columns: each member's numbers are in its state.

    What a program was traced under (globals, closures, attributes) is looked at before each call, and what takes
    longer to compare (large arrays, members' attributes) before each epoch and verb: if it has changed, another is
    traced. Members whose calls change such values, or draw from Python's generators, run as they are, each on its
    own, and nothing of them is traced.
    """

    def __init__(
        self,
        members: Sequence[Member],
        task: Task,
        columns: Mapping[str, np.ndarray],
        device: jax.Device,
        *,
        fused: bool,
        programs: Programs | None = None,
    ) -> None:
        self._members = list(members)
        self._reads = _reads(members[0].model, task)
        self._signature = signature(members[0].model)
        definition = JaxDefinition(members[0].model, task)
        found = _found(self._signature, definition, device, fused)
        super().__init__(members, definition, found.backend, fused=fused, programs=found)
        self._begun = False  # whether a step was taken since the members were last looked at
        self._ready: set[str] = set()  # kinds of steps that are known to be traceable
        self._unlike: str | None = None  # where members of the lane differ by now

    def ready(self, kind: str, hyper: Any, active: Any, data: Any, *, shared: bool) -> None:
        """Have the program for batches like this one; run Python where a call does more than compute."""
        self._look()
        if self._unlike is not None:
            raise CannotFuseError(self._unlike)
        reads = _reads(self._members[0].model, self.task)
        with reads.held():
            super().ready(kind, hyper, active, data, shared=shared)
            changed = reads.changed(draws=True)
        form = self._shared_definition.form
        if changed is not None and form.changes is None:
            form.changes = changed
        if form.changes is not None and self.untraced is None:
            self.programs.refuse(kind, _changes(form))
        self._own_if_untraced()
        self._ready.add(kind)

    def train(
        self,
        hyper: Any,
        active: Any,
        data: Any,
        weights: Any,
        *,
        shared: bool,
        pace: Any = None,
        steps: int | None = None,
    ) -> None:
        """One step of the active members, or `steps` of them on data (and weights) with a step axis."""
        one = data if steps is None else map_tree(lambda leaf: leaf[0], data)
        self._begin("train", hyper, one, shared=shared)
        if self._unlike is not None:
            raise CannotFuseError(self._unlike)
        super().train(hyper, active, data, weights, shared=shared, pace=pace, steps=steps)

    def gradients(self, data: Any, weights: Any = None, *, shared: bool) -> Any:
        """Return what a step of every member makes of a batch before its optimizer does."""
        self._begin("train", {}, data, shared=shared)
        if self._unlike is not None:
            raise CannotFuseError(self._unlike)
        return super().gradients(data, weights, shared=shared)

    def train_some(self, slots: np.ndarray, hyper: Any, data: Any, *, shared: bool, pace: Any = None) -> None:
        """One step of the members in some slots; one that has become unlike the others has its own program."""
        self._begin("train", hyper, data if shared else _first(data), shared=True)
        if self._unlike is None:
            super().train_some(slots, hyper, data, shared=shared, pace=pace)
            return
        for place, slot in enumerate(slots):
            own = data if shared else map_tree(lambda leaf, place=place: leaf[place : place + 1], data)
            with self._serving(slot):
                super().train_some(np.array([slot]), hyper, own, shared=shared, pace=pace)

    def evaluate(
        self, totals: Any, slots: Any, data: Any, weights: Any, counts: np.ndarray, size: int, *, shared: bool
    ) -> Any:
        """`totals` (None at first) with a batch added."""
        self._begun &= totals is not None
        few = data if slots is None or shared else _first(data)
        self._begin("evaluate", None, few, shared=shared or slots is not None)
        if self._unlike is None:
            return super().evaluate(totals, slots, data, weights, counts, size, shared=shared)
        for place, slot in enumerate((np.flatnonzero(counts) if slots is None else slots).tolist()):
            rows = np.array([slot if slots is None else place])
            own = self.cut(data, rows, int(counts[slot]), shared=shared)
            with self._serving(slot):
                totals = super().evaluate(totals, np.array([slot]), own, None, counts, size, shared=shared)
        return totals

    def forward(self, data: Any, *, shared: bool, counts: np.ndarray | None = None) -> Any:
        """Return the outputs `(slot, row, …)` on a batch of inputs, on the device."""
        self._begin("predict", None, data, shared=shared)
        if self._unlike is not None:  # since the verb began
            raise CannotFuseError(self._unlike)
        return super().forward(data, shared=shared, counts=counts)

    def predict_some(self, positions: Positions, data: Any, counts: np.ndarray) -> Any:
        """Return the outputs of some members, each on rows of its own, as NumPy arrays `(member, row, …)`."""
        self._begin("predict", None, _first(data), shared=True)
        if self._unlike is not None:
            raise CannotFuseError(self._unlike)
        return super().predict_some(positions, data, counts)

    @contextmanager
    def _serving(self, slot: int) -> Iterator[None]:
        """Have the programs of the member in a slot, who may be unlike the first."""
        member = self._members[self.slots[slot]]
        structure, usual = signature(member.model), self.programs
        if structure == self._signature:
            yield
            return
        definition = JaxDefinition(member.model, self.task)
        self.programs = _found(structure, definition, self.device, fused=False)
        self._shared_definition.go_on(self._own_form)
        try:
            yield
            if self._shared_definition.form.changes is not None:
                raise self._too_late(member, _changes(self._shared_definition.form))
        finally:
            self.programs = usual

    def _begin(self, kind: str, hyper: Any, data: Any, *, shared: bool) -> None:
        """Before a call: have programs for what Python reads now, and know whether it can be traced."""
        if not self._begun or (self.untraced is None and self._reads.changed(thoroughly=False) is not None):
            self._look()
        self._begun = True
        if kind in self._ready or self.untraced is not None or self._unlike is not None:
            return
        try:
            self.ready(kind, hyper, self._all(), data, shared=shared)
        except CannotFuseError as error:
            if self._shared_definition.form.changes is not None:
                raise self._too_late(self._members[0], str(error)) from error
            raise

    @staticmethod
    def _too_late(member: Member, reason: str) -> StrategyError:
        return StrategyError(
            f"member {member.name!r} and those like it can't go on as one: {reason}. "
            f'Use strategy="interleaved", where each member runs its own model.'
        )

    def epoch_values(self) -> dict[str, np.ndarray]:
        """The loss and the metrics `(slot,)` since the last call; the next epoch begins at nothing."""
        self._begun = False
        return super().epoch_values()

    def maskable(self, batch: Any) -> bool:
        """Whether padded rows can be weighted out without being felt."""
        if not self._begun or self._reads.changed(thoroughly=False) is not None:
            self._look()
        with self._trial():
            return self.untraced is None and super().maskable(batch)

    def rows_apart(self, inputs: Any) -> bool:
        """Return True if the output for a row depends on that row alone."""
        with self._trial():
            return self.untraced is None and super().rows_apart(inputs)

    def working_bytes(self, batch: Any) -> int | None:
        """What a train step on a batch like this takes on the device beside the state; None if not known."""
        with self._trial():
            return super().working_bytes(batch)

    @contextmanager
    def _trying(self, batch: Any, data: Any, name: str) -> Iterator[Any]:
        with self._trial(), super()._trying(batch, data, name) as few:
            yield few

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Leave nothing of what runs within: neither in what Python holds, nor in the form."""
        form = self._shared_definition.form
        kept, form.keep = form.keep, False
        try:
            with _reads(self._members[0].model, self.task).held():
                yield
        finally:
            form.keep = kept

    @property
    def _shared_definition(self) -> "JaxDefinition":
        found = self.programs.definition
        assert isinstance(found, JaxDefinition)
        return found

    def _look(self) -> None:
        """See whether what the programs were traced under is still so; have others if it is not."""
        if self.untraced is not None:
            self._own_form.form.take(self._members[0].model)
            return
        models = [member.model for member in self._members[:_MOST_LOOKED_AT]]
        signatures = [signature(model) for model in models] if is_module(models[0]) else [signature(models[0])]
        if self._reads.changed() is None and all(found == self._signature for found in signatures):
            return
        self._unlike = None
        for member, found in zip(self._members, signatures, strict=False):
            what = difference(found, signatures[0])
            if what is not None:
                self._unlike = f"{member.name!r} has become unlike {self._members[0].name!r}: {what}"
        self._ready.clear()
        before = self._shared_definition
        self._reads, self._signature = _reads(models[0], self.task), signatures[0]
        self._definition = JaxDefinition(models[0], self.task)
        self._definition.go_on(before)
        self.programs = _found(self._signature, self._definition, self.device, self.fused)
        self._shared_definition.go_on(before)

    def _own_if_untraced(self) -> None:
        """Python runs with the member's own form: what calls change stays its own."""
        if self.untraced is not None and self.programs.definition is not self._definition:
            own = Programs(self._definition, self.backend, fused=False)
            self._own_form.go_on(self._shared_definition)
            own.refuse("train", self.untraced)
            self.programs = own
        if self.untraced is not None:
            self._own_form.form.keep = True

    @property
    def _own_form(self) -> "JaxDefinition":
        assert isinstance(self._definition, JaxDefinition)
        return self._definition


def _changes(form: Any) -> str:
    return f"a call changes what Python holds ({form.changes})"


def _first(data: Any) -> Any:
    """The rows of the first of several members."""
    return map_tree(lambda leaf: leaf[0], data)


def _reads(model: Any, task: Task) -> Reads:
    """The Python values that a model's code and its task's may read."""
    optimizer = task.optimizer
    roots: dict[str, Any] = {
        "the objective": task.objective,
        "the loss": None if task.loss is None else task.loss.rows,
        "the metrics": task.metrics,
        "the optimizer": None if optimizer is None else (optimizer.make, optimizer.fixed),
    }
    if is_module(model):
        return Reads({**roots, **dict(statics(model))})
    return Reads({**roots, "apply": model[1]})


def _found(structure: Any, definition: "JaxDefinition", device: jax.Device, fused: bool) -> Programs:
    """The programs of a structure and a task, for all fleets of a process, if they are as they were traced."""
    key = (structure, definition.task, device, fused)
    known = _programs.pop(key, None)
    if known is None or known.untraced is not None or known.reads.changed() is not None:
        known = Programs(definition, JaxBackend(device), fused=fused)
        known.reads = _reads(definition.model, definition.task)
    _programs[key] = known
    while len(_programs) > _MOST_PROGRAMS:
        _programs.pop(next(iter(_programs)))
    return known


class JaxDefinition(Definition):
    """One member's steps (see `functional.Definition`)."""

    def __init__(self, model: Any, task: Task) -> None:
        self.task = task
        self.model = model
        self.form = form_of(model)
        self._slots: Tree | None = None
        self._fresh: dict[str, np.ndarray] = {}
        self.maskable = False  # until `try_out` has seen what the loss gives

    def go_on(self, other: "JaxDefinition") -> None:
        """Know what another of the same task has found out by trying."""
        self._slots = self._slots or other._slots
        self._fresh = self._fresh or other._fresh
        self.maskable = self.maskable or other.maskable

    def state(self, member: Member) -> State:
        """A member's params, buffers and slots; and its random key, and where its gradient is clipped."""
        params, buffers = self.form.parts(member.model)
        own = self.task.own.get(member.name, {})
        key = {"key": key_data(member.seed)}
        clip = {"clip_norm": np.float32(own.get("clip_norm", np.inf))} if self.task.clip else {}
        state = {"params": as_numpy(params), "buffers": as_numpy(buffers), "optimizer": {}, "member": key | clip}
        if self.task.optimizer is not None and params:
            slots = self.task.optimizer.state(self.form.tree(params), own)
            self._slots = self._slots or Tree(slots)
            state["optimizer"] = as_numpy(self._slots.parts(slots))
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
        loss_of = self._loss_of(state, batch, weights)
        found = self.gradients(state, batch, weights)
        return self.apply(state, hyper, found, lambda tree: loss_of(self.form.flat(tree))[0])

    def apply(
        self, state: State, hyper: Any, found: dict[str, Any], value_of: Callable[[Any], Any] | None = None
    ) -> tuple[State, Any, Any]:
        """Return the state after an update by what `gradients` found.

        `value_of` gives the loss on the same batch for other params, for optimizers that search along a line.
        """
        import optax

        assert self.task.optimizer is not None
        assert self._slots is not None
        loss, gradients, after = found["loss"], found["gradients"], found
        finite = jnp.isfinite(sum((g * 0).sum() for g in gradients.values()))
        if self.task.clip:
            gradients = _clipped(gradients, state["member"]["clip_norm"])
        # A forward may change weights itself, as nnx.SpectralNorm does: these are what the optimizer steps.
        params, slots = self.form.tree(after["params"]), self._slots.tree(state["optimizer"])
        # Some transformations go by the loss: Polyak's steps, the plateau's; and those that search along a line.
        tree = self.form.tree(gradients)
        extra = self.task.optimizer.taken(value=loss, grad=tree, value_fn=value_of)
        updates, slots = self.task.optimizer.transformation.update(tree, slots, params, **extra)
        new = {
            "params": self.form.flat(optax.apply_updates(params, updates)),
            "buffers": after["buffers"],
            "optimizer": self._slots.parts(slots),
        }
        kept: State = {part: _as_before(tensors, state[part]) for part, tensors in new.items()}
        kept["metrics"] = found["metrics"]
        return kept, jnp.isfinite(loss), finite

    def gradients(self, state: State, batch: Any, weights: Any) -> dict[str, Any]:
        """Return what a step makes of a batch before its optimizer does."""
        loss_of = self._loss_of(state, batch, weights)
        (loss, (found, after)), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        return {**after, "loss": loss, "gradients": gradients, "metrics": self._added(state["metrics"], found)}

    def _loss_of(self, state: State, batch: Any, weights: Any) -> Callable[[Parts], Any]:
        def loss_of(params: Parts) -> Any:
            (loss, found), after = self._losses({**state, "params": params}, batch, weights, True)
            return loss, (found, after)

        return loss_of

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
        call = self.form.call
        outputs, after = self._run(state, False, lambda model: widened(call(model, x), self.task.precision))
        return outputs, _changed(after, state)

    def write_back(self, member: Member, state: State) -> None:
        """Put a member's arrays into its module, or make a new pair of them."""
        member.model = self.form.write_back(member.model, state["params"], state["buffers"])

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
        return self._run(state, train, lambda model: self.task.run(self.form.call, model, batch, weights))

    def _run(self, state: State, train: bool, use: Callable[[Any], Any]) -> tuple[Any, State]:
        member = state["member"]
        key = jax.random.fold_in(key_of(member["key"]), member["step"])
        given = self._cast(state["params"])
        result, params, buffers = self.form.run(given, state["buffers"], key, use, train=train)
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

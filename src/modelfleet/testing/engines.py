"""Checks of the state that an engine keeps, for its author to run.

    @pytest.mark.parametrize("check", engines.CHECKS)
    def test_my_engine(check):
        check(case)

The checks call an engine as a lane does (`modelfleet.frameworks.engine.Engine`), without feeds and fleets. Engines
of one member skip the checks in `OF_SEVERAL`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from modelfleet.errors import StrategyError
from modelfleet.feeds import Batch
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.predict_rows import predict_rows
from modelfleet.frameworks.stacked import WEIGHTS, by_path
from modelfleet.members import Member
from modelfleet.trees import map_tree
from modelfleet.types import Model, Tensor, Tree

Check = Callable[["Case"], None]
WIDTH = 3


@dataclass(frozen=True, eq=False)
class Case:
    """Describes an engine to check."""

    members: Callable[[], Sequence[Member]]
    """`members()`: return new members with new models, equal at every call."""
    engine: Callable[[Sequence[Member]], Engine]
    """`engine(members)`: return a new engine, with an optimizer that has a state."""
    batch: Callable[[Sequence[int]], Tree]
    """`batch(slots)`: return data `(slot, row, …)` for the members in these slots, as tensors."""
    weights: Callable[[Model], Mapping[str, np.ndarray]]
    """`weights(model)`: return a copy of everything that a model contains, by name, in its own dtypes."""
    hyper: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Hyperparameters `(member,)` that are not part of the state."""
    width: int = WIDTH
    """Number of members: `WIDTH`, or 1 for an engine that takes only one."""

    def some(self) -> list[int]:
        """Return the slots that stay when others rest."""
        return [0] if self.width == 1 else [0, 2]

    def fresh(self, row: int) -> dict[str, np.ndarray]:
        """Return the weights of a new member's model."""
        return dict(self.weights(self.members()[row].model))


def _begun(case: Case) -> tuple[Engine, Sequence[Member]]:
    members = case.members()
    engine = case.engine(members)
    _begin(case, engine, members)
    return engine, members


def _begin(case: Case, engine: Engine, members: Sequence[Member]) -> None:
    slots, batch = range(case.width), _batch(case, range(case.width))
    engine.check(batch, members[0].name)
    engine.ready("train", _hyper(case, engine, slots), _on(engine, case.width), batch)
    engine.clear_trouble()


def _train(case: Case, engine: Engine, slots: Sequence[int], active: Sequence[bool] | None = None) -> None:
    on = engine.tensor(np.array([True] * len(slots) if active is None else active))
    engine.train(_hyper(case, engine, slots), on, _batch(case, slots), (1, None))


def _batch(case: Case, slots: Sequence[int]) -> Batch:
    data = case.batch(slots)
    return Batch(data, False, np.full(len(slots), data[0].shape[1]))


def _only_some(case: Case) -> list[bool]:
    return [slot in case.some() for slot in range(case.width)]


def _hyper(case: Case, engine: Engine, slots: Sequence[int]) -> dict[str, Tensor]:
    return {name: engine.tensor(column[list(slots)]) for name, column in case.hyper.items()}


def _on(engine: Engine, width: int) -> Tensor:
    return engine.tensor(np.ones(width, dtype=bool))


def _written(case: Case, engine: Engine, members: Sequence[Member]) -> list[dict[str, np.ndarray]]:
    engine.scatter(range(len(members)), members)
    return [dict(case.weights(member.model)) for member in members]


def _differ(found: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return any((found[name] != value).any() for name, value in other.items())


def _same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float = 2e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, f"{name} is {found[name].dtype}, was {value.dtype}"
        np.testing.assert_allclose(
            np.asarray(found[name], np.float64), np.asarray(value, np.float64), tolerance, tolerance, err_msg=name
        )


def state_goes_in_and_out(case: Case) -> None:
    """Check that state that is stacked and written back at once is unchanged, in the same dtypes."""
    members = case.members()
    before = [dict(case.weights(member.model)) for member in members]
    for found, expected in zip(_written(case, case.engine(members), members), before, strict=True):
        _same(found, expected, 0)


def idle_members_stay_as_they_are(case: Case) -> None:
    """Check that a step changes only the active members, and counts only for them."""
    engine, members = _begun(case)
    idle = case.width // 2
    before = [dict(case.weights(member.model)) for member in members]
    _train(case, engine, range(case.width), [slot != idle for slot in range(case.width)])
    assert engine.steps_taken().tolist() == [int(slot != idle) for slot in range(case.width)]
    for row, after in enumerate(_written(case, engine, members)):
        if row == idle:
            _same(after, before[row], 0)
        else:
            assert _differ(after, before[row])


def some_slots_step_as_all_do(case: Case) -> None:
    """Check that `train_some` on a part of a batch equals `train` of the same members."""
    (one, first), (other, second) = _begun(case), _begun(case)
    _train(case, one, range(case.width), _only_some(case))
    batch = _batch(case, range(case.width))
    some = other.first_rows(batch, np.array(case.some()), batch.size)
    other.train_some(_hyper(case, other, range(case.width)), some, (1, None))
    for found, expected in zip(_written(case, other, second), _written(case, one, first), strict=True):
        _same(found, expected)


def several_steps_are_so_many_single_ones(case: Case) -> None:
    """Check that `train` of several steps at once equals `train` of one after the other."""
    (one, first), (other, second) = _begun(case), _begun(case)
    slots = range(case.width)
    for _ in range(3):
        _train(case, one, slots)
    batch, hyper = _batch(case, slots), _hyper(case, other, slots)
    batch = replace(batch, data=map_tree(lambda leaf: _repeated(leaf, 3), batch.data), steps=3)
    other.train(hyper, _on(other, case.width), batch, (1, None))
    assert other.steps_taken().tolist() == [3] * case.width
    for found, expected in zip(_written(case, other, second), _written(case, one, first), strict=True):
        _same(found, expected)


def a_step_in_parts_is_a_step(case: Case) -> None:
    """Check that `apply` of `gradients` equals `train`. An engine whose step has no parts refuses them."""
    (one, first), (other, second) = _begun(case), _begun(case)
    slots, active = range(case.width), _only_some(case)
    hyper, on = _hyper(case, other, slots), other.tensor(np.array(active))
    try:
        for _ in range(2):
            other.apply(hyper, on, other.gradients(_batch(case, slots)))
    except StrategyError:
        return
    for _ in range(2):
        _train(case, one, slots, active)
    assert other.steps_taken().tolist() == one.steps_taken().tolist()
    for found, expected in zip(_written(case, other, second), _written(case, one, first), strict=True):
        _same(found, expected)
    sums = other.epoch_values()
    for name, values in one.epoch_values().items():
        np.testing.assert_allclose(sums[name], values, 1e-5, err_msg=name)


def narrowed_members_step_as_before(case: Case) -> None:
    """Check that `give_slots` changes which members step, and nothing else."""
    (one, first), (other, second) = _begun(case), _begun(case)
    for _ in range(2):
        _train(case, one, range(case.width), _only_some(case))
    other.give_slots(np.array(case.some()))
    for _ in range(2):
        _train(case, other, case.some())
    other.give_slots(np.arange(case.width))
    for found, expected in zip(_written(case, other, second), _written(case, one, first), strict=True):
        _same(found, expected)


def state_is_loaded_whether_narrowed_or_not(case: Case) -> None:
    """Check that training continues from the state that `read` returned, after `write`, from the host too."""
    trained, members = _begun(case)
    _train(case, trained, range(case.width))
    host = members[0].framework.arrays.host
    kept = map_tree(lambda tensor: np.array(host(tensor)), trained.read(range(case.width)))
    expected, own = _begun(case)
    expected.write(range(case.width), kept)
    _train(case, expected, range(case.width), _only_some(case))
    found, twins = _begun(case)
    found.give_slots(np.array(case.some()))
    found.write(range(case.width), kept)
    _train(case, found, case.some())
    found.give_slots(np.arange(case.width))
    assert found.steps_taken().tolist() == [1 + taken for taken in _only_some(case)]
    for one, other in zip(_written(case, found, twins), _written(case, expected, own), strict=True):
        _same(one, other)


def adopted_members_go_on(case: Case) -> None:
    """Check that an engine continues with `adopt` where another engine of its members has ended."""
    (one, first), (before, members) = _begun(case), _begun(case)
    for _ in range(3):
        _train(case, one, range(case.width))
    for _ in range(2):
        _train(case, before, range(case.width))
    before.scatter(range(case.width), members)
    after = case.engine(members)
    after.adopt(range(case.width), before, range(case.width))
    _begin(case, after, members)
    _train(case, after, range(case.width))
    assert after.steps_taken().tolist() == [3] * case.width
    for found, expected in zip(_written(case, after, members), _written(case, one, first), strict=True):
        _same(found, expected)


def weights_are_read_and_written(case: Case) -> None:
    """Check that `write` restores the weights that `read` returned, however far training has gone since."""
    engine, members = _begun(case)
    _train(case, engine, range(case.width))
    before = _written(case, engine, members)
    kept = engine.read(range(case.width), WEIGHTS)
    for _ in range(2):
        _train(case, engine, range(case.width))
    engine.write(range(case.width), kept)
    for found, expected in zip(_written(case, engine, members), before, strict=True):
        _same(found, expected, 0)


def members_are_read_and_written_with_and_without_a_slot(case: Case) -> None:
    """Check that `read` and `write` take members by position, in any order, with or without a slot."""
    engine, members = _begun(case)
    before = [dict(case.weights(member.model)) for member in members]
    kept = engine.read([2, 1, 0], WEIGHTS)
    engine.give_slots(np.array([0, 2]))
    assert engine.slots.tolist() == [0, 2]
    _train(case, engine, [0, 2])
    mixed = engine.read([1, 0], WEIGHTS)  # a member that rests, and one that has stepped
    engine.write([2, 1], {part: {name: t[:2] for name, t in own.items()} for part, own in kept.items()})
    engine.give_slots(np.arange(case.width))
    after = _written(case, engine, members)
    assert _differ(after[0], before[0])
    _same(after[1], before[1], 0)
    _same(after[2], before[2], 0)
    engine.write([2, 1], mixed)
    swapped = _written(case, engine, members)
    _same(swapped[1], after[0], 0)
    _same(swapped[2], before[1], 0)


def one_member_is_scattered_and_gathered(case: Case) -> None:
    """Check that `scatter` and `gather` move one member alone, with or without a slot."""
    engine, members = _begun(case)
    engine.give_slots(np.array([0, 2]))
    _train(case, engine, [0, 2])
    engine.scatter([2], [members[2]])
    assert _differ(case.weights(members[2].model), case.fresh(2))
    _same(case.weights(members[0].model), case.fresh(0), 0)
    engine.gather([0], [members[0]])  # whose model still holds the first weights
    engine.scatter([1], [members[1]])
    _same(case.weights(members[1].model), case.fresh(1), 0)
    engine.give_slots(np.arange(case.width))
    after = _written(case, engine, members)
    _same(after[0], case.fresh(0), 0)
    assert _differ(after[2], case.fresh(2))


def everything_that_is_read_is_of_the_members_asked_for(case: Case) -> None:
    """Check that `read` of all parts returns one row per position, as copies."""
    engine, _ = _begun(case)
    _train(case, engine, range(case.width))
    state = engine.read(case.some())
    before = {path: np.array(_host(tensor)) for path, tensor in by_path(state).items()}
    assert all(len(tensor) == len(case.some()) for tensor in before.values())
    _train(case, engine, range(case.width))
    for path, tensor in by_path(state).items():
        np.testing.assert_array_equal(_host(tensor), before[path], err_msg=path)


def trouble_is_noted_and_forgiven(case: Case) -> None:
    """Check that a member whose loss is NaN keeps its state until its trouble is cleared."""
    engine, members = _begun(case)
    before = dict(case.weights(members[0].model))
    slots, batch = range(case.width), _batch(case, range(case.width))
    data = batch.data
    sick = data[0].copy() if isinstance(data[0], np.ndarray) else data[0].clone()
    sick[0] = float("nan")
    hyper, on = _hyper(case, engine, slots), _on(engine, case.width)
    engine.train(hyper, on, replace(batch, data=(sick, *data[1:])), (1, None))
    assert engine.trouble()[0] != 0
    assert not engine.trouble()[1:].any()
    _train(case, engine, slots)
    assert engine.steps_taken().tolist() == [0, *[2] * (case.width - 1)]
    engine.clear_trouble()
    assert not engine.trouble().any()
    _same(_written(case, engine, members)[0], before, 0)
    _train(case, engine, slots)
    assert engine.steps_taken().tolist() == [1, *[3] * (case.width - 1)]


def epochs_begin_at_nothing(case: Case) -> None:
    """Check that `epoch_values` cover the steps since the last call, whatever was evaluated in between."""
    engine, _ = _begun(case)
    kept = engine.read(range(case.width), WEIGHTS)
    slots, batch = range(case.width), _batch(case, range(case.width))
    found = []
    for _ in range(2):
        _train(case, engine, slots)
        engine.values(engine.evaluate(None, batch))
        found.append(engine.epoch_values())
        engine.write(range(case.width), kept)
    for name, values in found[0].items():
        assert values.shape == (case.width,)
        np.testing.assert_allclose(found[1][name], values, 1e-5, err_msg=name)


def evaluating_some_slots_is_evaluating_all(case: Case) -> None:
    """Check that evaluating slots one after the other adds up to evaluating all at once."""
    engine, _ = _begun(case)
    batch = _batch(case, range(case.width))
    expected = engine.values(engine.evaluate(None, batch))
    totals = None
    for slots in (np.array([2]), np.array([0, 1])) if case.width > 1 else (np.array([0]),):
        totals = engine.evaluate(totals, engine.first_rows(batch, slots, batch.size))
    for name, values in engine.values(totals).items():
        np.testing.assert_allclose(values, expected[name], 1e-5, err_msg=name)


def some_members_predict_as_all_do(case: Case) -> None:
    """Check that members that predict on their own rows, in any order, give the outputs of all together."""
    engine, members = _begun(case)
    batch = _batch(case, range(case.width))
    batch = replace(batch, data=engine.inputs(batch.data))
    engine.ready("predict", {}, _on(engine, case.width), batch)
    outputs, arrays = engine.predict(batch), members[0].framework.arrays
    positions = list(range(case.width))[::-1]
    counts = [batch.size - number % 2 * 2 for number in range(case.width)]
    given = [_host(batch.data[position])[:count] for position, count in zip(positions, counts, strict=True)]
    for position, own, rows in zip(positions, predict_rows(engine, arrays, positions, given), given, strict=True):
        np.testing.assert_allclose(own, outputs[position, : len(rows)], 1e-5, 1e-6)


def members_predict_on_shared_rows(case: Case) -> None:
    """Check that members that predict on shared rows, all or some, give the outputs of rows of their own."""
    engine, members = _begun(case)
    rows = _host(engine.inputs(case.batch([0]))[0])
    positions, arrays = list(range(case.width))[::-1], members[0].framework.arrays
    shared = predict_rows(engine, arrays, positions, [rows] * case.width)
    own = predict_rows(engine, arrays, positions, [rows.copy() for _ in positions])
    for found, expected in zip(shared, own, strict=True):
        np.testing.assert_allclose(found, expected, 1e-5, 1e-6)


def _host(tensor: Tensor) -> np.ndarray:
    """Return the numbers of a tensor of any framework, bfloat16 in float32."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu()
        tensor = tensor.float() if "bfloat16" in str(tensor.dtype) else tensor
    return np.asarray(tensor)


def _repeated(leaf: Tensor, steps: int) -> Tensor:
    """Return an array of NumPy or a tensor of torch with an axis of steps in front."""
    return np.stack([leaf] * steps) if isinstance(leaf, np.ndarray) else leaf.expand(steps, *leaf.shape)


OF_SEVERAL: Sequence[Check] = (
    members_are_read_and_written_with_and_without_a_slot,
    one_member_is_scattered_and_gathered,
)
"""Checks that need more than one member."""

CHECKS: Sequence[Check] = (
    state_goes_in_and_out,
    idle_members_stay_as_they_are,
    some_slots_step_as_all_do,
    several_steps_are_so_many_single_ones,
    a_step_in_parts_is_a_step,
    narrowed_members_step_as_before,
    state_is_loaded_whether_narrowed_or_not,
    adopted_members_go_on,
    weights_are_read_and_written,
    everything_that_is_read_is_of_the_members_asked_for,
    trouble_is_noted_and_forgiven,
    epochs_begin_at_nothing,
    evaluating_some_slots_is_evaluating_all,
    some_members_predict_as_all_do,
    members_predict_on_shared_rows,
    *OF_SEVERAL,
)
"""All checks. Each has the name of what must hold."""

"""What every engine must hold of the state it keeps, as checks that its author can run.

    @pytest.mark.parametrize("check", engines.CHECKS)
    def test_my_engine(check):
        check(case)

They ask an engine as a lane does (`modelfleet.frameworks.protocol.Engine`), without feeds and fleets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelfleet.feeds import Batch
from modelfleet.frameworks.protocol import Engine
from modelfleet.members import Member

Check = Callable[["Case"], None]
WIDTH = 3


@dataclass(frozen=True, eq=False)
class Case:
    """An engine, as the suite needs to know it."""

    make: Callable[[], tuple[Engine, Sequence[Member]]]
    """A new engine of `WIDTH` members, the same at every call, whose optimizer keeps a state."""
    batch: Callable[[Sequence[int]], Any]
    """`batch(slots)`: data `(slot, row, …)` for the members in these slots, as the adapter has them."""
    weights: Callable[[Any], Mapping[str, np.ndarray]]
    """All that a model holds, by name, in its own dtypes; a copy."""


def _begun(case: Case) -> tuple[Engine, Sequence[Member]]:
    engine, members = case.make()
    data = case.batch(range(WIDTH))
    engine.check(Batch(data, False, np.full(WIDTH, _rows(data))), members[0].name)
    engine.ready("train", {}, _on(engine, WIDTH), data, shared=False)
    return engine, members


def _train(case: Case, engine: Engine, slots: Sequence[int], active: Sequence[bool] | None = None) -> None:
    on = engine.tensor(np.array([True] * len(slots) if active is None else active))
    engine.train({}, on, case.batch(slots), None, shared=False, pace=(1, None))


def _on(engine: Engine, width: int) -> Any:
    return engine.tensor(np.ones(width, dtype=bool))


def _rows(data: Any) -> int:
    return int(data[0].shape[1])


def _written(case: Case, engine: Engine, members: Sequence[Member]) -> list[dict[str, np.ndarray]]:
    engine.write_back(members)
    return [dict(case.weights(member.model)) for member in members]


def _same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float = 2e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, f"{name} is {found[name].dtype}, was {value.dtype}"
        np.testing.assert_allclose(
            np.asarray(found[name], np.float64), np.asarray(value, np.float64), tolerance, tolerance, err_msg=name
        )


def state_goes_in_and_out(case: Case) -> None:
    """What is stacked and written back at once is what was there, in its dtypes."""
    engine, members = case.make()
    before = [dict(case.weights(member.model)) for member in members]
    for found, expected in zip(_written(case, engine, members), before, strict=True):
        _same(found, expected, 0)


def idle_members_stay_as_they_are(case: Case) -> None:
    """A step changes the active members, and counts for them alone."""
    engine, members = _begun(case)
    before = dict(case.weights(members[1].model))
    _train(case, engine, range(WIDTH), [True, False, True])
    assert engine.steps_taken().tolist() == [1, 0, 1]
    after = _written(case, engine, members)
    _same(after[1], before, 0)
    assert any((after[0][name] != case.weights(case.make()[1][0].model)[name]).any() for name in after[0])


def some_slots_step_as_all_do(case: Case) -> None:
    """`train_some` on cut data is `train` of the same members."""
    (one, first), (other, second) = _begun(case), _begun(case)
    _train(case, one, range(WIDTH), [True, False, True])
    slots = np.array([0, 2])
    data = other.cut(case.batch(range(WIDTH)), slots, _rows(case.batch(range(WIDTH))), shared=False)
    other.train_some(slots, {}, data, shared=False, pace=(1, None))
    for found, expected in zip(_written(case, other, second), _written(case, one, first), strict=True):
        _same(found, expected)


def narrowed_members_step_as_before(case: Case) -> None:
    """`narrow` and `widen` change who steps, and nothing else."""
    (one, first), (other, second) = _begun(case), _begun(case)
    for _ in range(2):
        _train(case, one, range(WIDTH), [True, False, True])
    other.narrow(np.array([0, 2]))
    for _ in range(2):
        _train(case, other, [0, 2])
    other.widen()
    for found, expected in zip(_written(case, other, second), _written(case, one, first), strict=True):
        _same(found, expected)


def state_is_loaded_whether_narrowed_or_not(case: Case) -> None:
    """`load` takes up what `tensors` gave, on the host too, and training goes on from it."""
    trained, members = _begun(case)
    _train(case, trained, range(WIDTH))
    host = members[0].framework.arrays.host
    kept = {name: np.array(host(tensor)) for name, tensor in trained.tensors().items()}
    expected, own = _begun(case)
    expected.load(kept)
    _train(case, expected, range(WIDTH), [True, False, True])
    found, twins = _begun(case)
    found.narrow(np.array([0, 2]))
    found.load(kept)
    _train(case, found, [0, 2])
    found.widen()
    assert found.steps_taken().tolist() == [2, 1, 2]
    for one, other in zip(_written(case, found, twins), _written(case, expected, own), strict=True):
        _same(one, other)


def snapshots_are_of_members_with_and_without_a_slot(case: Case) -> None:
    """`snapshot` and `restore` reach the working state, and the one it was narrowed from."""
    engine, members = _begun(case)
    before = [dict(case.weights(member.model)) for member in members]
    engine.narrow(np.array([0, 2]))
    kept, aside = engine.snapshot(1, True), engine.snapshot(1, False)
    _train(case, engine, [0, 2])
    engine.restore(1, True, kept)
    engine.restore(0, False, aside)  # under the member in slot 0, whose new state is put over it
    engine.restore(1, False, aside)
    engine.widen()
    after = _written(case, engine, members)
    _same(after[1], before[1], 0)
    _same(after[2], before[2], 0)


def one_member_is_written_out_and_taken_in(case: Case) -> None:
    """`write_out` and `restack` are of one member, whether it has a slot or not."""
    engine, members = _begun(case)
    engine.narrow(np.array([0, 2]))
    _train(case, engine, [0, 2])
    fresh = dict(case.weights(case.make()[1][1].model))
    engine.write_out(0, False, members[1])  # the state before the narrowed step, of member 0
    _same(case.weights(members[1].model), case.weights(case.make()[1][0].model), 0)
    engine.write_out(1, True, members[2])
    trained = dict(case.weights(members[2].model))
    assert any((trained[name] != case.weights(case.make()[1][2].model)[name]).any() for name in trained)
    engine.restack(np.array([0]), [case.make()[1][1]], working=True)
    engine.widen()
    _same(_written(case, engine, members)[0], fresh, 0)


def trouble_is_noted_and_forgiven(case: Case) -> None:
    """A member whose loss is NaN keeps its state until it is forgiven."""
    engine, members = _begun(case)
    before = dict(case.weights(members[0].model))
    data = case.batch(range(WIDTH))
    sick = data[0].copy() if isinstance(data[0], np.ndarray) else data[0].clone()
    sick[0] = float("nan")
    engine.train({}, _on(engine, WIDTH), (sick, *data[1:]), None, shared=False, pace=(1, None))
    assert engine.trouble()[0] != 0
    assert not engine.trouble()[1:].any()
    _train(case, engine, range(WIDTH))
    assert engine.steps_taken().tolist() == [0, 2, 2]
    engine.forgive()
    assert not engine.trouble().any()
    _same(_written(case, engine, members)[0], before, 0)


def evaluating_some_slots_is_evaluating_all(case: Case) -> None:
    """`evaluate` of slots one after the other adds up to that of all."""
    engine, _ = _begun(case)
    data = case.batch(range(WIDTH))
    rows = _rows(data)
    counts = np.full(WIDTH, rows)
    expected = engine.values(engine.evaluate(None, None, data, None, counts, rows, shared=False))
    totals = None
    for slots in (np.array([2]), np.array([0, 1])):
        cut = engine.cut(data, slots, rows, shared=False)
        totals = engine.evaluate(totals, slots, cut, None, counts, rows, shared=False)
    for name, values in engine.values(totals).items():
        np.testing.assert_allclose(values, expected[name], 1e-5, err_msg=name)


CHECKS: Sequence[Check] = (
    state_goes_in_and_out,
    idle_members_stay_as_they_are,
    some_slots_step_as_all_do,
    narrowed_members_step_as_before,
    state_is_loaded_whether_narrowed_or_not,
    snapshots_are_of_members_with_and_without_a_slot,
    one_member_is_written_out_and_taken_in,
    trouble_is_noted_and_forgiven,
    evaluating_some_slots_is_evaluating_all,
)
"""All checks. Each has the name of what must hold."""

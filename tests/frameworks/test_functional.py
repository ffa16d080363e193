"""The functional engine on the smallest member there is: a line through points, trained by hand-written SGD."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modelfleet.errors import InputError
from modelfleet.feeds import Batch
from modelfleet.frameworks import jax as adapter
from modelfleet.frameworks.errors import GRADIENT, LOSS, CannotFuseError
from modelfleet.frameworks.functional import Definition, FunctionalEngine, State
from modelfleet.frameworks.jax.backend import JaxBackend
from modelfleet.frameworks.jax.task import Task
from modelfleet.frameworks.lane_context import LaneContext, alike
from modelfleet.frameworks.stacked import WEIGHTS
from modelfleet.members import Member
from modelfleet.trees import map_tree

ROWS = 6


@dataclass
class Line:
    """`slope * x`, and how often it was stepped."""

    slope: float
    seen: int = 0


@dataclass
class LineDefinition(Definition):
    """Least squares with momentum; `centered` models feel every row of a batch."""

    centered: bool = False
    branches: bool = False
    counts: bool = False
    task: Any = None
    can_mask_rows: bool = True
    tried: list[Any] = field(default_factory=list)

    def state(self, member: Member) -> State:
        slope, seen = np.float32(member.model.slope), np.int32(member.model.seen)
        rate = np.float32(0.1 * member.seed)
        return {
            "params": {"000.slope": slope},
            "buffers": {"000.seen": seen},
            "optimizer": {"000.speed": np.float32(0), "001.rate": rate},
        }

    def try_out(self, state: State, batch: Any) -> None:
        self.tried.append(jax.tree.map(jnp.shape, batch))
        self._loss(state["params"]["000.slope"], batch, None)

    def fresh_metrics(self) -> dict[str, Any]:
        return {"total": np.float32(0), "rows": np.float32(0)}

    def _loss(self, slope: Any, batch: Any, weights: Any) -> tuple[Any, Any]:
        x, y = batch
        if self.centered:
            x = x - x.mean()
        if self.branches and x.sum() > 100:
            x = x / 2
        weights = jnp.ones(len(x)) if weights is None else weights
        return (weights * (slope * x - y) ** 2).sum() / jnp.maximum(weights.sum(), 1), weights.sum()

    def gradients(self, state: State, batch: Any, weights: Any) -> dict[str, Any]:
        slope = state["params"]["000.slope"]
        (loss, rows), gradient = jax.value_and_grad(self._loss, has_aux=True)(slope, batch, weights)
        return {"loss": loss, "gradients": gradient, "metrics": self._added(state["metrics"], loss, rows)}

    def apply(self, state: State, hyper: Any, found: dict[str, Any]) -> tuple[State, Any, Any]:
        slope, slots = state["params"]["000.slope"], state["optimizer"]
        speed = 0.9 * slots["000.speed"] + found["gradients"]
        new = {
            "params": {"000.slope": slope - slots["001.rate"] * speed},
            "buffers": {"000.seen": state["buffers"]["000.seen"] + 1},
            "optimizer": {**slots, "000.speed": speed},
            "metrics": found["metrics"],
        }
        return new, found["loss"], jnp.isfinite(found["gradients"])

    def evaluate(self, state: State, metrics: Any, batch: Any, weights: Any) -> tuple[dict[str, Any], State]:
        added = self._added(metrics, *self._loss(state["params"]["000.slope"], batch, weights))
        return added, self._counted(state)

    def _added(self, metrics: Any, loss: Any, rows: Any) -> dict[str, Any]:
        return {"total": metrics["total"] + loss * rows, "rows": metrics["rows"] + rows}

    def results(self, metrics: Any) -> dict[str, Any]:
        return {"loss": metrics["total"] / metrics["rows"], "a_rows": metrics["rows"]}

    def predict(self, state: State, x: Any) -> tuple[Any, State]:
        return {"line": state["params"]["000.slope"] * x}, self._counted(state)

    def _counted(self, state: State) -> State:
        return {"buffers": {"000.seen": state["buffers"]["000.seen"] + 1}} if self.counts else {}

    def write_back(self, member: Member, state: State) -> None:
        member.model = Line(float(state["params"]["000.slope"]), int(state["buffers"]["000.seen"]))


def members(width: int) -> list[Member]:
    return [Member(str(number), Line(0.5 * number), number + 1, adapter) for number in range(width)]


def context(own: list[Member], programs: Any = None) -> LaneContext[Task, Any]:
    return alike(own, Task(), {}, None, fused=len(own) > 1, programs=programs)


def engine(width: int = 3, own: list[Member] | None = None, **options: Any) -> FunctionalEngine:
    backend = JaxBackend(jax.devices("cpu")[0])
    own = members(width) if own is None else own
    made = FunctionalEngine(context(own), LineDefinition(**options), backend)
    made.check(batch(len(own)), "0")
    return made


def data(width: int, rows: int = ROWS, steps: int | None = None, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    shape = (width, rows) if steps is None else (steps, width, rows)
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return x, 3 * x


def batch(width: int, counts: list[int] | None = None, rows: int = ROWS) -> Batch:
    return Batch(data(width, rows), False, np.array(counts or [rows] * width))


def train(
    made: FunctionalEngine,
    values: Any,
    active: list[bool] | None = None,
    *,
    steps: int | None = None,
    shared: bool = False,
) -> None:
    on = made.tensor(np.array([True] * len(made.trouble()) if active is None else active))
    made.train({}, on, Batch(values, shared, np.full(len(made.trouble()), ROWS), steps), (1, None))


def slopes(made: FunctionalEngine) -> np.ndarray:
    return np.asarray(made.state["params"]["000.slope"])


@pytest.fixture(scope="module")
def trained() -> np.ndarray:
    """The slopes of three members after five steps, one call a step."""
    made = engine()
    x, y = data(3, steps=5)
    for step in range(5):
        train(made, (x[step], y[step]))
    assert made.steps_taken().tolist() == [5, 5, 5]
    return slopes(made)


def test_several_steps_a_call_are_the_steps_one_by_one(trained: np.ndarray) -> None:
    made = engine()
    train(made, data(3, steps=5), steps=5)  # by a program for eight
    np.testing.assert_array_equal(slopes(made), trained)
    assert made.steps_taken().tolist() == [5, 5, 5]
    assert np.asarray(made.state["buffers"]["000.seen"]).tolist() == [5, 5, 5]


def test_a_program_serves_other_numbers_of_steps(trained: np.ndarray) -> None:
    made = engine()
    x, y = data(3, steps=5)
    train(made, (x[:3], y[:3]), steps=3)
    compiled, _ = made.programs._functions("several", False)
    train(made, (np.concatenate([x[3:], x[:2]]), np.concatenate([y[3:], y[:2]])), steps=4)
    assert compiled._cache_size() == 1  # pyrefly: ignore[missing-attribute]  # of jax.jit
    train(made, (x[2:], y[2:]), steps=3)
    assert made.steps_taken().tolist() == [10, 10, 10]


def test_a_member_alone_has_the_numbers_it_has_among_others(trained: np.ndarray) -> None:
    x, y = data(3, steps=5)
    for number, member in enumerate(members(3)):
        made = engine(own=[member])
        assert not made.fused
        own = slice(number, number + 1)
        train(made, (x[:, own], y[:, own]), steps=5)
        np.testing.assert_allclose(slopes(made), trained[own], rtol=1e-6)


def test_shared_data_have_no_member_axis(trained: np.ndarray) -> None:
    made, other = engine(), engine()
    x, y = data(1)
    train(made, (x[0], y[0]), shared=True)
    train(other, (np.repeat(x, 3, 0), np.repeat(y, 3, 0)))
    np.testing.assert_allclose(slopes(made), slopes(other), rtol=1e-6)


@pytest.mark.parametrize(("value", "code"), [(np.nan, LOSS), (1e25, LOSS)])
def test_trouble_stays_with_its_member(value: float, code: int) -> None:
    made, sound = engine(), engine()
    x, y = data(3, steps=4)
    train(sound, (x, y), steps=4)
    x = x.copy()
    x[1, 1] = value
    train(made, (x, y), steps=4)
    assert made.trouble().tolist() == [0, code, 0]
    assert made.steps_taken().tolist() == [4, 1, 4]
    assert np.isfinite(slopes(made)).all()
    np.testing.assert_array_equal(slopes(made)[[0, 2]], slopes(sound)[[0, 2]])
    made.clear_trouble()
    assert made.trouble().tolist() == [0, 0, 0]


def test_a_gradient_that_is_not_finite_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(self: LineDefinition, state: State, hyper: Any, batch: Any, weights: Any) -> Any:
        new, loss, _ = original(self, state, hyper, batch, weights)
        return new, loss, state["optimizer"]["001.rate"] < 0.25

    original = LineDefinition.train
    monkeypatch.setattr(LineDefinition, "train", bad)
    made = engine()
    train(made, data(3))
    assert made.trouble().tolist() == [0, 0, GRADIENT]


def test_members_that_are_not_active_stay_as_they_are(trained: np.ndarray) -> None:
    made = engine()
    train(made, data(3, steps=5), [True, False, True], steps=5)
    assert slopes(made)[1] == 0.5
    np.testing.assert_array_equal(slopes(made)[[0, 2]], trained[[0, 2]])
    values = made.epoch_values()
    assert list(values) == ["loss", "a_rows"]  # in the order of the definition
    assert values["a_rows"].tolist() == [5 * ROWS, 0, 5 * ROWS]
    assert np.isnan(values["loss"][1])
    assert made.epoch_values()["a_rows"].tolist() == [0, 0, 0]


def test_some_members_step_on_fewer_rows() -> None:
    made, other = engine(), engine()
    x, y = data(3)
    made.train_some({}, made.first_rows(batch(3), np.array([0, 2]), 4))
    train(other, (x[:, :4], y[:, :4]), [True, False, True])
    np.testing.assert_allclose(slopes(made), slopes(other), rtol=1e-6)
    assert made.steps_taken().tolist() == [1, 0, 1]


def test_padding_is_weighted_out() -> None:
    made, other = engine(), engine()
    padded = batch(3, [6, 4, 6])
    assert made.can_mask_padding(padded)
    weights = made.row_weights(padded.counts, padded.size)
    made.train({}, made.tensor(np.ones(3, bool)), replace(padded, weights=weights), (1, None))
    other.train_some({}, other.first_rows(padded, np.array([1]), 4))
    np.testing.assert_allclose(slopes(made)[1], slopes(other)[1], rtol=1e-6)


def test_a_model_that_feels_padding_is_found_out() -> None:
    assert not engine(centered=True).can_mask_padding(batch(3, [6, 4, 6]))
    assert not engine(can_mask_rows=False).can_mask_padding(batch(3, [6, 4, 6]))


def test_evaluation_adds_up_batches() -> None:
    made = engine()
    x, y = data(3)
    totals = made.evaluate(None, batch(3, [6, 0, 6]))
    totals = made.evaluate(totals, made.first_rows(batch(3), np.array([1]), 4))
    values = made.values(totals)
    expected = [
        np.mean((slope * x[row, :rows] - y[row, :rows]) ** 2)
        for row, (slope, rows) in enumerate(zip([0, 0.5, 1], [6, 4, 6], strict=True))
    ]
    np.testing.assert_allclose(values["loss"], expected, rtol=1e-6)
    assert made.steps_taken().tolist() == [0, 0, 0]


def test_predictions_come_as_rows_of_numpy() -> None:
    made = engine()
    x, _ = data(3)
    assert made.inputs((x, x)) is x
    outputs = made.predict(Batch(x, False, np.full(3, ROWS)))
    assert isinstance(outputs["line"], np.ndarray)
    np.testing.assert_array_equal(outputs["line"][2], x[2])
    some = made.predict(Batch(x[0], True, np.full(2, ROWS)), [2, 0])
    np.testing.assert_array_equal(some["line"], np.stack([x[0], 0 * x[0]]))


def test_narrowed_members_go_on_and_come_back(trained: np.ndarray) -> None:
    made = engine()
    x, y = data(3, steps=5)
    train(made, (x[:2], y[:2]), steps=2)
    before = slopes(made).copy()
    made.give_slots(np.array([2, 0]))
    train(made, (x[2:, [2, 0]], y[2:, [2, 0]]), steps=3)
    assert made.read([2], WEIGHTS)["params"]["000.slope"].shape == (1,)
    all_of_it = made.read(range(3))["params"]["000.slope"]
    made.give_slots(np.arange(3))
    np.testing.assert_array_equal(slopes(made), np.asarray(all_of_it))
    np.testing.assert_allclose(slopes(made)[[0, 2]], trained[[0, 2]], rtol=1e-6)
    assert slopes(made)[1] == before[1]
    assert made.steps_taken().tolist() == [5, 2, 5]


def test_a_snapshot_is_restored_wherever_the_member_is() -> None:
    made = engine()
    snapshot = made.read([1], WEIGHTS)
    train(made, data(3))
    made.give_slots(np.array([0]))
    stored = {part: {key: np.asarray(t) for key, t in own.items()} for part, own in snapshot.items()}
    made.write([1], stored)
    made.write([0], snapshot)
    made.give_slots(np.arange(3))
    assert slopes(made)[:2].tolist() == [0.5, 0.5]
    assert np.asarray(made.state["buffers"]["000.seen"]).tolist() == [0, 0, 1]


def test_a_run_goes_on_from_its_tensors(trained: np.ndarray) -> None:
    made, other = engine(), engine()
    x, y = data(3, steps=5)
    train(made, (x[:3], y[:3]), steps=3)
    other.write(range(3), map_tree(np.asarray, made.read(range(3))))
    train(other, (x[3:], y[3:]), steps=2)
    np.testing.assert_array_equal(slopes(other), trained)
    assert other.epoch_values()["a_rows"].tolist() == [5 * ROWS] * 3


def test_a_member_takes_its_optimizer_along() -> None:
    made, other = engine(), engine(2)
    train(made, data(3))
    train(made, data(3))
    other.adopt([1], made, [2])
    assert other.steps_taken().tolist() == [0, 2]
    speeds = np.asarray(other.state["optimizer"]["000.speed"])
    assert speeds[0] == 0
    assert speeds[1] == np.asarray(made.state["optimizer"]["000.speed"])[2]
    assert slopes(other)[1] == 0.5  # its weights come from its model


def test_models_are_stacked_anew_and_written_back() -> None:
    own = members(3)
    made = engine(own=own)
    own[1].model = Line(7.0)
    made.gather([1], [own[1]])
    assert slopes(made).tolist() == [0, 7, 1]
    train(made, data(3))
    made.scatter(range(3), own)
    np.testing.assert_allclose([member.model.slope for member in own], slopes(made))
    assert [member.model.seen for member in own] == [1, 1, 1]


def test_what_cannot_be_traced_is_not_fused_and_alone_runs_its_python(trained: np.ndarray) -> None:
    made = engine(branches=True)
    on = made.tensor(np.ones(3, bool))
    with pytest.raises(CannotFuseError, match="branches on an array's values"):
        made.ready("train", {}, on, batch(3))
    alone = engine(own=members(1), branches=True)
    alone.ready("train", {}, alone.tensor(np.ones(1, bool)), batch(1))
    assert alone.program == "Python"
    assert alone.untraced is not None
    x, y = data(3, steps=5)
    train(alone, (x[:, :1], y[:, :1]), steps=5)
    np.testing.assert_allclose(slopes(alone), trained[:1], rtol=1e-5)
    assert alone.epoch_values()["a_rows"].tolist() == [5 * ROWS]


def test_programs_are_handed_to_the_next_engine() -> None:
    made = engine()
    train(made, data(3))
    backend = made.backend
    other = FunctionalEngine(context(members(3), made.programs), LineDefinition(), backend)
    other.check(batch(3), "0")
    train(other, data(3))
    np.testing.assert_array_equal(slopes(other), slopes(made))
    compiled, _ = made.programs._functions("train", False)
    assert compiled._cache_size() == 1  # pyrefly: ignore[missing-attribute]  # of jax.jit


def test_data_that_do_not_fit_are_refused_with_their_shapes() -> None:
    made = engine()
    x, _ = data(3)
    wrong = Batch((x, np.zeros((3, ROWS, 4), np.float32)), False, np.full(3, ROWS))
    with pytest.raises(
        InputError, match=r"member '0' can't take this batch: \(2,\) float32, \(2, 4\) float32 into"
    ):
        made.check(wrong, "0")
    assert made.output_shape(batch(3), "0") is None  # a dict
    definition = made.programs.definition
    assert isinstance(definition, LineDefinition)
    assert definition.tried[0] == ((2,), (2,))  # two rows of one member


def test_what_a_lane_costs_is_known() -> None:
    made = engine()
    assert made.parameters == 1
    assert made.bytes == 3 * 6 * 4  # slope, seen, speed, rate, step, trouble
    needed = made.working_bytes(batch(3))
    assert needed is not None
    assert needed >= 0
    assert made.program == "jit, 16 steps a call"
    assert made.out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"))
    assert not made.out_of_memory(RuntimeError("INTERNAL"))


def test_tensors_have_memory_of_their_own() -> None:
    made = engine()
    array = np.zeros(1 << 12, np.float32)
    tensor = made.tensor(array)
    array[:] = 7
    assert not np.asarray(tensor).any()


# --- what evaluating and predicting change


def seen(made: FunctionalEngine) -> list[int]:
    return np.asarray(made.state["buffers"]["000.seen"]).tolist()


def test_what_evaluating_changes_is_kept_for_the_members_that_had_rows() -> None:
    made = engine(counts=True)
    made.evaluate(None, batch(3, [ROWS, 0, ROWS]))
    assert seen(made) == [1, 0, 1]
    made.evaluate(None, made.first_rows(batch(3), np.array([1]), 2))
    assert seen(made) == [1, 1, 1]


def test_what_predicting_changes_is_kept_for_the_members_that_had_rows() -> None:
    made = engine(counts=True)
    x, _ = data(3)
    expected = made.predict(Batch(x, False, np.full(3, ROWS)))["line"]
    assert seen(made) == [1, 1, 1]
    found = made.predict(Batch(x, False, np.array([ROWS, 0, 2])))["line"]
    assert seen(made) == [2, 1, 2]
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[2, :2], expected[2, :2])


def test_what_evaluating_and_predicting_changed_is_known_until_all_models_have_it() -> None:
    own = members(3)
    made = engine(own=own, counts=True)
    assert not made.changed
    made.predict(Batch(data(3)[0], False, np.full(3, ROWS)))
    assert made.changed
    made.scatter([1], own[1:2])
    assert made.changed
    made.scatter(range(3), own)
    assert not made.changed
    assert [member.model.seen for member in own] == [1, 1, 1]


# --- loading


def test_a_narrowed_state_is_loaded_for_all_members() -> None:
    trained, made = engine(), engine()
    train(trained, data(3))
    made.give_slots(np.array([0, 2]))
    made.write(range(3), trained.read(range(3)))
    np.testing.assert_array_equal(slopes(made), slopes(trained)[[0, 2]])
    train(made, tuple(part[[0, 2]] for part in data(3)))
    made.give_slots(np.arange(3))
    train(trained, data(3), [True, False, True])
    np.testing.assert_array_equal(slopes(made), slopes(trained))

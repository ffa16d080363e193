"""What every framework's adapter must hold, as checks that its author can run.

Describe the framework by a `Case`, and let pytest run every check on it:

    @pytest.mark.parametrize("check", conformance.CHECKS)
    def test_my_adapter(check):
        check(case)

The checks use fleets as people do, and nothing of an adapter's inside. Most of their time goes into making a
framework's programs and training models alone. So they have the same few forms of batches, and a model that was
trained alone is kept for the checks that follow.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from pathlib import Path
from typing import Any

import numpy as np

import modelfleet as mf

SEED = 3
KINDS = ("mlp", "dropout", "batchnorm", "unlike")
STRATEGIES = ("fused", "interleaved", "threads", "processes")
BATCH = 8
EVEN, RAGGED = 2 * BATCH, 2 * BATCH - 2
"""Rows of two batches: alike, and with a shorter last one."""
RATES = {"a": 0.02, "b": 0.05, "c": 0.01, "d": 0.03}

Data = tuple[Any, Any]
Weights = Mapping[str, Any]
Check = Callable[["Case"], None]


def classes(seed: int, rows: int) -> Data:
    """Rows of four numbers, and one of three classes for each that can be learnt from them."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 4)).astype(np.float32)
    return x, np.argmax(x[:, :3] + 0.1 * generator.normal(size=(rows, 3)), axis=1).astype(np.int32)


def cross_entropy(outputs: np.ndarray, labels: np.ndarray) -> float:
    """The mean cross-entropy of labels under logits."""
    shifted = outputs.astype(np.float64) - outputs.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return float(-logs[np.arange(len(labels)), labels].mean())


@dataclass(frozen=True, eq=False)
class Case:
    """A framework, as the suite needs to know it.

    `make`, `compile`, `alone`, `weights` and `outputs` are for the adapter's author to write; the rest fits models
    that take four numbers and give three logits.
    """

    make: Callable[[str, int], Any]
    """`make(kind, seed)`: a new model of one of `KINDS`, its weights given by the seed. "dropout" draws while it
    trains, "batchnorm" has statistics of its batches, and "unlike" has another structure than "mlp"."""
    compile: Callable[[mf.Fleet, Any], None]
    """`compile(fleet, lr)`: compile a fleet for this learning rate, or `each(...)`, with an optimizer that keeps a
    state (Adam, say)."""
    alone: Callable[..., Any]
    """`alone(model, name, data, *, lr, seed, epochs, batch_size, shuffle)`: a copy of the model, trained by the
    framework's own means as the member `name` of a fleet of this seed is to be."""
    weights: Callable[[Any], Weights]
    """`weights(model)`: all that training changes, by name; a copy, for the model may be trained on."""
    outputs: Callable[[Any, Any], Any]
    """`outputs(model, x)`: what the model gives outside of training."""
    data: Callable[[int, int], Data] = classes
    """`data(seed, rows)`: NumPy arrays to learn from."""
    loss: Callable[[np.ndarray, np.ndarray], float] = cross_entropy
    """`loss(outputs, y)`: what `evaluate` must call "loss"."""
    tolerance: float = 1e-5
    """How far weights may be apart, relative to the largest of a tensor (or to 1, if that is more)."""
    in_place: bool = True
    """Whether a member's model is the very object that was given; False where models can't be changed."""


# --- in a fleet as alone -----------------------------------------------------------------------------------------


def in_a_fleet_as_alone(case: Case, kind: str, rates: str) -> None:
    """Members of one structure are what each would have been alone."""
    lr = {name: RATES["a"] if rates == "one" else RATES[name] for name in "ab"}
    fleet = _fleet(case, dict.fromkeys("ab", kind), lr=lr if rates == "each" else RATES["a"])
    before = {name: case.weights(fleet[name]) for name in fleet.names}
    history = _fit(fleet, case.data(0, EVEN), epochs=2)
    for name in fleet.names:
        _same(case, fleet[name], _alone(case, kind, name, lr=lr[name]), f"member {name!r} of {kind}")
        _finite(history[name]["loss"], 2)
        moved = _distance(case.weights(fleet[name]), before[name])[0]
        assert moved > 10 * case.tolerance, f"member {name!r} was not trained"


def unlike_members_as_alone(case: Case) -> None:
    """Members of unlike structure, each with its own data, are what each would have been alone."""
    kinds = {"a": "dropout", "b": "unlike", "c": "dropout"}
    fleet = _fleet(case, kinds, lr=RATES)
    _fit(fleet, mf.each({name: _own(case, name, EVEN) for name in kinds}), epochs=2)
    for name, kind in kinds.items():
        _same(case, fleet[name], _alone(case, kind, name, own=True), f"member {name!r}")


def ragged_batches_as_alone(case: Case, kind: str) -> None:
    """A last batch of fewer rows counts as it does alone."""
    fleet = _fleet(case, dict.fromkeys("ab", kind), lr=RATES)
    _fit(fleet, case.data(0, RAGGED), epochs=2)
    for name in fleet.names:
        _same(case, fleet[name], _alone(case, kind, name, rows=RAGGED), f"member {name!r} of {kind}")


def own_data_as_alone(case: Case, kind: str) -> None:
    """Members whose data sets have unlike lengths are what each would have been alone."""
    rows = {"a": EVEN, "b": RAGGED, "c": BATCH}
    fleet = _fleet(case, dict.fromkeys(rows, kind), lr=RATES)
    history = _fit(fleet, mf.each({name: _own(case, name, rows[name]) for name in rows}), epochs=2)
    for name in rows:
        expected = _alone(case, kind, name, rows=rows[name], own=True)
        _same(case, fleet[name], expected, f"member {name!r} of {kind}")
        _finite(history[name]["loss"], 2)


def own_epochs_as_alone(case: Case) -> None:
    """Members may train for unlike numbers of epochs."""
    epochs = {"a": 1, "b": 3}
    fleet = _fleet(case, dict.fromkeys(epochs, "dropout"), lr=RATES)
    history = _fit(fleet, case.data(0, EVEN), epochs=mf.each(epochs))
    for name, count in epochs.items():
        expected = _alone(case, "dropout", name, epochs=count)
        _same(case, fleet[name], expected, f"member {name!r} of {count} epochs")
        _finite(history[name]["loss"], count)


def evaluate_and_predict_as_alone(case: Case) -> None:
    """`predict` gives what a trained model gives by itself, and `evaluate` its loss; on ragged batches, too."""
    fleet = _fleet(case, {"a": "dropout", "b": "dropout", "c": "batchnorm"}, lr=RATES)
    x, y = case.data(1, RAGGED)
    history = _fit(fleet, case.data(0, EVEN), validation=(x, y))
    values = fleet.evaluate((x, y), batch_size=BATCH)
    outputs = fleet.predict(x, batch_size=BATCH)
    for name in fleet.names:
        expected = np.asarray(case.outputs(fleet[name], x))
        assert type(outputs[name]) is np.ndarray, f"predict gave {type(outputs[name]).__name__} for {name!r}"
        _near(outputs[name], expected, case.tolerance, f"outputs of member {name!r}")
        loss = case.loss(expected, y)
        _near(values[name]["loss"], loss, case.tolerance, f"loss of member {name!r}")
        _near(history[name]["val_loss"][-1], loss, case.tolerance, f"val_loss of member {name!r}")


# --- independence ------------------------------------------------------------------------------------------------


def position_and_company_do_not_matter(case: Case) -> None:
    """A member's numbers are the same wherever it stands, and whoever else is there."""
    companies: Sequence[Mapping[str, str]] = (
        {"b": "dropout"},
        {"a": "dropout", "b": "dropout", "c": "dropout"},
        {"c": "unlike", "b": "dropout"},
    )
    for kinds in companies:
        fleet = _fleet(case, kinds, lr=RATES)
        _fit(fleet, case.data(0, EVEN), epochs=2)
        _same(case, fleet["b"], _alone(case, "dropout", "b"), f"member 'b' among {', '.join(kinds)}")


def strategies_agree(case: Case, strategy: str) -> None:
    """Every strategy gives the numbers that the members have alone, with data sets of unlike lengths."""
    kinds: dict[str, str] = dict.fromkeys("ab", "dropout")
    if strategy != "fused":  # which would refuse members of unlike structure
        kinds["c"] = "batchnorm"
    rows = {"a": RAGGED, "b": EVEN, "c": BATCH}
    fleet = _fleet(case, kinds, lr=RATES)
    data = {name: _own(case, name, rows[name]) for name in kinds}
    history = _fit(fleet, mf.each(data), epochs=2, strategy=strategy)
    assert not history.failed, history.failed
    for name, kind in kinds.items():
        expected = _alone(case, kind, name, rows=rows[name], own=True)
        _same(case, fleet[name], expected, f"member {name!r} with strategy {strategy!r}")
        _finite(history[name]["loss"], 2)


def devices_agree(case: Case) -> None:
    """A fleet on two devices, its group split over both, has the weights and the history of one device."""
    kinds: dict[str, str] = dict.fromkeys("ab", "dropout")
    data = case.data(0, EVEN)

    def run(devices: str, strategy: str) -> tuple[mf.Fleet, mf.History]:
        fleet = _fleet(case, kinds, lr=RATES, devices=devices)
        return fleet, _fit(fleet, data, epochs=2, validation=data, strategy=strategy)

    _, expected = run("cpu", "auto")
    for strategy in ("threads", "processes"):
        two, history = run("cpu:0,cpu:1", strategy)
        used = {lane.device for lane in two.plan(data, batch_size=BATCH).lanes}
        assert used == {"cpu:0", "cpu:1"}, f"of two devices only {used} were used"
        assert not history.failed, history.failed
        for name, kind in kinds.items():
            who = f"member {name!r} on two devices with strategy {strategy!r}"
            _same(case, two[name], _alone(case, kind, name), who)
            assert history[name].keys() == expected[name].keys(), f"member {name!r} has {', '.join(history[name])}"
            for metric, values in expected[name].items():
                _near(history[name][metric], values, case.tolerance, f"{metric} of member {name!r}")


def fitting_twice_is_fitting_longer(case: Case) -> None:
    """A second `fit` goes on from where the members are: weights, optimizers, shuffles and dropout."""
    kinds = {"a": "dropout", "b": "dropout", "c": "batchnorm"}
    fleet = _fleet(case, kinds, lr=RATES)
    for _ in range(2):
        _fit(fleet, case.data(0, EVEN))
    for name, kind in kinds.items():
        _same(case, fleet[name], _alone(case, kind, name), f"member {name!r}")


# --- trouble -----------------------------------------------------------------------------------------------------


def a_sick_member_is_set_aside(case: Case) -> None:
    """A member whose numbers become NaN is named and keeps its last good state; the others do not feel it."""
    fleet = _fleet(case, dict.fromkeys("ba", "dropout"), lr=RATES)
    data = {name: _own(case, name, EVEN) for name in "ba"}
    good = tuple(part[:BATCH].copy() for part in data["b"])
    data["b"][0][BATCH + 1] = np.nan  # within the second batch
    history = _fit(fleet, mf.each(data), epochs=2, shuffle=False)
    assert set(history.failed) == {"b"}, f"expected 'b' to be set aside alone, got {history.failed}"
    assert "NaN" in history.failed["b"].reason, history.failed["b"].reason
    assert (history.failed["b"].epoch, history.failed["b"].step) == (1, 2), history.failed["b"]
    _same(case, fleet["a"], _alone(case, "dropout", "a", own=True, shuffle=False), "the member beside a sick one")
    expected = _trained(case, "dropout", "b", good, epochs=1, shuffle=False)
    _same(case, fleet["b"], expected, "the member set aside, after its last good step")


def failing_data_are_set_aside(case: Case) -> None:
    """A member whose data raise is named and keeps what it has learnt; the others do not feel it."""

    def batches(name: str) -> Callable[[], Iterator[Data]]:
        def read() -> Iterator[Data]:
            x, y = _own(case, name, EVEN)
            for start in range(0, len(x), BATCH):
                if name == "b" and start == BATCH:
                    raise OSError("the disk is gone")
                yield x[start : start + BATCH], y[start : start + BATCH]

        return read

    fleet = _fleet(case, dict.fromkeys("ba", "dropout"), lr=RATES)
    history = fleet.fit(mf.each({name: batches(name) for name in "ba"}), epochs=2, progress=False)
    assert set(history.failed) == {"b"}, f"expected 'b' to be set aside alone, got {history.failed}"
    assert "the disk is gone" in history.failed["b"].reason, history.failed["b"].reason
    expected = _alone(case, "dropout", "a", own=True, shuffle=False)
    _same(case, fleet["a"], expected, "the member beside one whose data failed")


# --- models ------------------------------------------------------------------------------------------------------


def plain_in_plain_out(case: Case) -> None:
    """What comes out of a fleet is what went in, with new weights."""
    kinds_of = {"a": "dropout", "b": "dropout", "c": "unlike"}
    models = {name: case.make(kind, _seed(name)) for name, kind in kinds_of.items()}
    kinds = {name: type(model) for name, model in models.items()}
    before = {name: case.weights(model) for name, model in models.items()}
    fleet = mf.Fleet(models)
    case.compile(fleet, RATES["a"])
    _fit(fleet, case.data(0, EVEN))
    for name, model in models.items():
        assert type(fleet[name]) is kinds[name], f"{name!r} is a {type(fleet[name]).__name__} now"
        if case.in_place:
            assert fleet[name] is model, f"{name!r} is another object now"
        after = case.weights(fleet[name])
        assert after.keys() == before[name].keys(), f"{name!r} has other weights now: {', '.join(after)}"
        assert _distance(after, before[name])[0] > 10 * case.tolerance, f"{name!r} has its old weights"


def saved_and_loaded(case: Case) -> None:
    """A saved fleet comes back with the very weights that it had."""
    fleet = _fleet(case, {"a": "batchnorm", "b": "batchnorm"}, lr=RATES)
    x, y = case.data(0, EVEN)
    _fit(fleet, (x, y))
    with tempfile.TemporaryDirectory() as folder:
        fleet.save(Path(folder) / "fleet")
        loaded = mf.load(Path(folder) / "fleet", factory=partial(case.make, "batchnorm", 99))
    assert loaded.names == fleet.names
    outputs = loaded.predict(x, batch_size=BATCH)
    for name in fleet.names:
        difference, where = _distance(_tensors(case, loaded[name]), _tensors(case, fleet[name]))
        assert difference == 0, f"{where} of {name!r} came back changed by {difference:.1e}"
        expected = case.outputs(fleet[name], x)
        _near(outputs[name], expected, case.tolerance, f"outputs of member {name!r}")


def members_come_and_go(case: Case) -> None:
    """Members that are dropped, added and cloned between fits leave the others as they are."""
    data = case.data(0, EVEN)
    fleet = _fleet(case, dict.fromkeys("ab", "dropout"), lr=RATES["a"])
    _fit(fleet, data)
    fleet.clone("a", as_="twin")
    _same(case, fleet["twin"], case.weights(fleet["a"]), "a clone")
    leaver = fleet.drop("b")
    _same(case, leaver, _alone(case, "dropout", "b", lr=RATES["a"], epochs=1), "the member that left")
    fleet.add("c", case.make("dropout", _seed("c")))
    assert fleet.names == ["a", "twin", "c"]
    _fit(fleet, data)
    _same(case, fleet["a"], _alone(case, "dropout", "a"), "the member that stayed")
    _same(case, fleet["c"], _alone(case, "dropout", "c", lr=RATES["a"], epochs=1), "the member that came")
    apart = _distance(case.weights(fleet["twin"]), case.weights(fleet["a"]))[0]
    assert apart > 10 * case.tolerance, "a clone has shuffles and dropout of its own, but went the same way"


# --- nothing lost ------------------------------------------------------------------------------------------------


class _Killed(Exception):  # noqa: N818
    """What breaks a run off."""


class _Die(mf.Callback):
    """Breaks a fit off after a step, as a fault of the machine would."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        """Raise after the step."""
        if self.step is not None and run.step >= self.step:  # a turn may be of several steps
            raise _Killed


def resumed_as_unbroken(case: Case) -> None:
    """A run that is broken off and started again ends as the unbroken one."""
    kinds = {"a": "dropout", "b": "dropout", "c": "batchnorm"}
    data = {name: _own(case, name, BATCH if name == "b" else EVEN) for name in kinds}

    def run(*callbacks: mf.Callback) -> tuple[mf.Fleet, mf.History]:
        fleet = _fleet(case, kinds, lr=RATES)
        return fleet, _fit(fleet, mf.each(data), epochs=3, callbacks=callbacks)

    with tempfile.TemporaryDirectory() as folder:
        unbroken, history = run()
        with suppress(_Killed):
            run(mf.Checkpoint(folder, every_steps=1), _Die(5))
            raise AssertionError("the run was to be broken off at its fifth step, but has fewer")
        resumed, other = run(mf.Checkpoint(folder, every_steps=1), _Die(None))
    for name in kinds:
        _same(case, resumed[name], case.weights(unbroken[name]), f"member {name!r} of the resumed run")
        _near(other[name]["loss"], history[name]["loss"], case.tolerance, f"losses of member {name!r}")


# --- helpers -----------------------------------------------------------------------------------------------------


def _seed(name: str) -> int:
    return ord(name)


def _fleet(case: Case, kinds: Mapping[str, str], *, lr: Any, devices: str = "auto") -> mf.Fleet:
    """A compiled fleet of these members. A member's first weights depend on its name and kind alone."""
    models = {name: case.make(kind, _seed(name)) for name, kind in kinds.items()}
    fleet = mf.Fleet(models, seed=SEED, devices=devices)
    case.compile(fleet, mf.each({name: lr[name] for name in kinds}) if isinstance(lr, Mapping) else lr)
    return fleet


def _fit(fleet: mf.Fleet, data: Any, **options: Any) -> mf.History:
    return fleet.fit(data, batch_size=BATCH, progress=False, **options)


def _own(case: Case, name: str, rows: int) -> Data:
    """Data that no other member has."""
    return case.data(_seed(name), rows)


@cache
def _alone(
    case: Case,
    kind: str,
    name: str,
    *,
    rows: int = EVEN,
    own: bool = False,
    lr: float | None = None,
    epochs: int = 2,
    shuffle: bool = True,
) -> Weights:
    """The weights of a member that was trained alone, on data of its own or on those of all; not to be changed."""
    data = _own(case, name, rows) if own else case.data(0, rows)
    return _trained(case, kind, name, data, lr=lr, epochs=epochs, shuffle=shuffle)


def _trained(
    case: Case, kind: str, name: str, data: Data, *, lr: float | None = None, epochs: int, shuffle: bool
) -> Weights:
    model = case.alone(
        case.make(kind, _seed(name)),
        name,
        data,
        lr=RATES[name] if lr is None else lr,
        seed=SEED,
        epochs=epochs,
        batch_size=BATCH,
        shuffle=shuffle,
    )
    return case.weights(model)


def _tensors(case: Case, model: Any) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in case.weights(model).items()}


def _distance(first: Weights, second: Weights) -> tuple[float, str]:
    """How far two sets of weights are apart at most, and the name of the tensor."""
    assert first.keys() == second.keys(), f"unlike weights: {', '.join(first)} and {', '.join(second)}"
    worst = (0.0, "")
    for name in first:
        a, b = (np.asarray(value).astype(np.float64) for value in (first[name], second[name]))
        assert a.shape == b.shape, f"{name} is {a.shape} and {b.shape}"
        size = max(1.0, float(np.abs(b).max(initial=0.0)))
        difference = float(np.abs(a - b).max(initial=0.0)) / size
        worst = max(worst, (difference if np.isfinite(difference) else np.inf, name))
    return worst


def _same(case: Case, model: Any, expected: Weights, who: str) -> None:
    difference, where = _distance(case.weights(model), expected)
    assert difference <= case.tolerance, f"{who}: {where} is off by {difference:.1e}, allowed {case.tolerance:.0e}"


def _near(value: Any, expected: Any, tolerance: float, what: str) -> None:
    a, b = np.asarray(value, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert a.shape == b.shape, f"{what}: {a.shape}, expected {b.shape}"
    difference = float(np.abs(a - b).max(initial=0.0)) / max(1.0, float(np.abs(b).max(initial=0.0)))
    assert difference <= tolerance, f"{what}: off by {difference:.1e}, allowed {tolerance:.0e}"


def _finite(values: Sequence[float], count: int) -> None:
    assert len(values) == count, f"{len(values)} epochs in the history, expected {count}"
    assert np.isfinite(values).all(), f"the history holds {values}"


def _check(function: Callable[..., None], *choices: str) -> Check:
    """A check, with its choices made and in its name, by which pytest calls it."""
    made = update_wrapper(partial(function, **dict(zip(_choices(function), choices, strict=True))), function)
    made.__name__ = "-".join([function.__name__, *choices])  # pyrefly: ignore
    return made


def _choices(function: Callable[..., None]) -> list[str]:
    return [name for name in function.__annotations__ if name not in ("case", "return")]


CHECKS: tuple[Check, ...] = (
    _check(in_a_fleet_as_alone, "mlp", "one"),
    *(_check(in_a_fleet_as_alone, kind, "each") for kind in ("dropout", "batchnorm")),
    _check(unlike_members_as_alone),
    *(_check(ragged_batches_as_alone, kind) for kind in ("dropout", "batchnorm")),
    _check(own_data_as_alone, "batchnorm"),  # of "dropout" it is part of what strategies agree on
    _check(own_epochs_as_alone),
    _check(evaluate_and_predict_as_alone),
    _check(position_and_company_do_not_matter),
    *(_check(strategies_agree, strategy) for strategy in STRATEGIES),
    _check(devices_agree),
    _check(fitting_twice_is_fitting_longer),
    _check(a_sick_member_is_set_aside),
    _check(failing_data_are_set_aside),
    _check(plain_in_plain_out),
    _check(saved_and_loaded),
    _check(members_come_and_go),
    _check(resumed_as_unbroken),
)
"""All checks. Each has the name of what must hold."""

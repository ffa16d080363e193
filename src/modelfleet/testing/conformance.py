"""Checks that every framework's adapter must pass, for its author to run.

Describe the framework by a `Case`, and let pytest run every check on it:

    @pytest.mark.parametrize("check", conformance.CHECKS)
    def test_my_adapter(check):
        check(case)

The checks use only the public API of fleets. Most of their time goes into compiling programs and training models
alone. So all checks use batches of the same few shapes, and keep models that were trained alone for later checks.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import numpy as np

import modelfleet as mf
from modelfleet.testing.case import (
    BATCH,
    EVEN,
    KINDS,
    RAGGED,
    RATES,
    Case,
    Data,
    check_finite,
    check_near,
    check_same,
    distance,
    fit,
    make_fleet,
    own_data,
    seed_of,
    trained_alone,
    weight_arrays,
    weights_alone,
)

__all__ = ["CHECKS", "KINDS", "Case", "Check"]

STRATEGIES = ("fused", "interleaved", "threads", "processes")

Check = Callable[["Case"], None]


# --- in a fleet as alone -----------------------------------------------------------------------------------------


def in_a_fleet_as_alone(case: Case, kind: str, rates: str) -> None:
    """Check that members of one structure are what each would have been alone."""
    lr = {name: RATES["a"] if rates == "one" else RATES[name] for name in "ab"}
    fleet = make_fleet(case, dict.fromkeys("ab", kind), lr=lr if rates == "each" else RATES["a"])
    before = {name: case.weights(fleet[name]) for name in fleet.names}
    history = fit(fleet, case.data(0, EVEN), epochs=2)
    for name in fleet.names:
        check_same(case, fleet[name], weights_alone(case, kind, name, lr=lr[name]), f"member {name!r} of {kind}")
        check_finite(history[name]["loss"], 2)
        moved = distance(case.weights(fleet[name]), before[name])[0]
        assert moved > 10 * case.tolerance, f"member {name!r} was not trained"


def unlike_members_as_alone(case: Case) -> None:
    """Check that members of different structures, each on its own data, are what each would have been alone."""
    kinds = {"a": "dropout", "b": "unlike", "c": "dropout"}
    fleet = make_fleet(case, kinds, lr=RATES)
    fit(fleet, mf.each({name: own_data(case, name, EVEN) for name in kinds}), epochs=2)
    for name, kind in kinds.items():
        check_same(case, fleet[name], weights_alone(case, kind, name, own=True), f"member {name!r}")


def ragged_batches_as_alone(case: Case, kind: str) -> None:
    """Check that a last batch of fewer rows counts as it does alone."""
    fleet = make_fleet(case, dict.fromkeys("ab", kind), lr=RATES)
    fit(fleet, case.data(0, RAGGED), epochs=2)
    for name in fleet.names:
        check_same(case, fleet[name], weights_alone(case, kind, name, rows=RAGGED), f"member {name!r} of {kind}")


def own_data_as_alone(case: Case, kind: str) -> None:
    """Check that members whose data sets have different lengths are what each would have been alone."""
    rows = {"a": EVEN, "b": RAGGED, "c": BATCH}
    fleet = make_fleet(case, dict.fromkeys(rows, kind), lr=RATES)
    history = fit(fleet, mf.each({name: own_data(case, name, rows[name]) for name in rows}), epochs=2)
    for name in rows:
        expected = weights_alone(case, kind, name, rows=rows[name], own=True)
        check_same(case, fleet[name], expected, f"member {name!r} of {kind}")
        check_finite(history[name]["loss"], 2)


def own_epochs_as_alone(case: Case) -> None:
    """Check that members may train for different numbers of epochs."""
    epochs = {"a": 1, "b": 3}
    fleet = make_fleet(case, dict.fromkeys(epochs, "dropout"), lr=RATES)
    history = fit(fleet, case.data(0, EVEN), epochs=mf.each(epochs))
    for name, count in epochs.items():
        expected = weights_alone(case, "dropout", name, epochs=count)
        check_same(case, fleet[name], expected, f"member {name!r} of {count} epochs")
        check_finite(history[name]["loss"], count)


def evaluate_and_predict_as_alone(case: Case) -> None:
    """Check that `predict` gives what a trained model gives, and `evaluate` its loss, on ragged batches too."""
    fleet = make_fleet(case, {"a": "dropout", "b": "dropout", "c": "batchnorm"}, lr=RATES)
    x, y = case.data(1, RAGGED)
    history = fit(fleet, case.data(0, EVEN), validation=(x, y))
    values = fleet.evaluate((x, y), batch_size=BATCH)
    outputs = fleet.predict(x, batch_size=BATCH)
    for name in fleet.names:
        expected = np.asarray(case.outputs(fleet[name], x))
        assert type(outputs[name]) is np.ndarray, f"predict gave {type(outputs[name]).__name__} for {name!r}"
        check_near(outputs[name], expected, case.tolerance, f"outputs of member {name!r}")
        loss = case.loss(expected, y)
        check_near(values[name]["loss"], loss, case.tolerance, f"loss of member {name!r}")
        check_near(history[name]["val_loss"][-1], loss, case.tolerance, f"val_loss of member {name!r}")


# --- independence ------------------------------------------------------------------------------------------------


def position_and_company_do_not_matter(case: Case) -> None:
    """Check that a member's numbers are the same at any position and with any other members."""
    companies: Sequence[Mapping[str, str]] = (
        {"b": "dropout"},
        {"a": "dropout", "b": "dropout", "c": "dropout"},
        {"c": "unlike", "b": "dropout"},
    )
    for kinds in companies:
        fleet = make_fleet(case, kinds, lr=RATES)
        fit(fleet, case.data(0, EVEN), epochs=2)
        check_same(case, fleet["b"], weights_alone(case, "dropout", "b"), f"member 'b' among {', '.join(kinds)}")


def strategies_agree(case: Case, strategy: str) -> None:
    """Check that every strategy gives members the numbers they have alone, with data sets of different lengths."""
    kinds: dict[str, str] = dict.fromkeys("ab", "dropout")
    if strategy != "fused":  # which would refuse members of different structures
        kinds["c"] = "batchnorm"
    rows = {"a": RAGGED, "b": EVEN, "c": BATCH}
    fleet = make_fleet(case, kinds, lr=RATES)
    data = {name: own_data(case, name, rows[name]) for name in kinds}
    history = fit(fleet, mf.each(data), epochs=2, strategy=strategy)
    assert not history.failed, history.failed
    for name, kind in kinds.items():
        expected = weights_alone(case, kind, name, rows=rows[name], own=True)
        check_same(case, fleet[name], expected, f"member {name!r} with strategy {strategy!r}")
        check_finite(history[name]["loss"], 2)


def devices_agree(case: Case) -> None:
    """Check that a group split over two devices has the weights and the history that it has on one device."""
    kinds: dict[str, str] = dict.fromkeys("ab", "dropout")
    data = case.data(0, EVEN)

    def run(devices: str, strategy: str) -> tuple[mf.Fleet, mf.History]:
        fleet = make_fleet(case, kinds, lr=RATES, devices=devices)
        return fleet, fit(fleet, data, epochs=2, validation=data, strategy=strategy)

    _, expected = run("cpu", "auto")
    for strategy in ("threads", "processes"):
        two, history = run("cpu:0,cpu:1", strategy)
        used = {lane.device for lane in two.plan(data, batch_size=BATCH).lanes}
        assert used == {"cpu:0", "cpu:1"}, f"of two devices only {used} were used"
        assert not history.failed, history.failed
        for name, kind in kinds.items():
            who = f"member {name!r} on two devices with strategy {strategy!r}"
            check_same(case, two[name], weights_alone(case, kind, name), who)
            assert history[name].keys() == expected[name].keys(), f"member {name!r} has {', '.join(history[name])}"
            for metric, values in expected[name].items():
                check_near(history[name][metric], values, case.tolerance, f"{metric} of member {name!r}")


def fitting_twice_is_fitting_longer(case: Case) -> None:
    """Check that a second `fit` continues where the members are: weights, optimizers, shuffles and dropout."""
    kinds = {"a": "dropout", "b": "dropout", "c": "batchnorm"}
    fleet = make_fleet(case, kinds, lr=RATES)
    for _ in range(2):
        fit(fleet, case.data(0, EVEN))
    for name, kind in kinds.items():
        check_same(case, fleet[name], weights_alone(case, kind, name), f"member {name!r}")


# --- trouble -----------------------------------------------------------------------------------------------------


def a_sick_member_is_set_aside(case: Case) -> None:
    """Check that a member with NaN is named and keeps its last good state, and the others are not affected."""
    fleet = make_fleet(case, dict.fromkeys("ba", "dropout"), lr=RATES)
    data = {name: own_data(case, name, EVEN) for name in "ba"}
    good = data["b"][0][:BATCH].copy(), data["b"][1][:BATCH].copy()
    data["b"][0][BATCH + 1] = np.nan  # within the second batch
    history = fit(fleet, mf.each(data), epochs=2, shuffle=False)
    assert set(history.failed) == {"b"}, f"expected 'b' to be set aside alone, got {history.failed}"
    assert "NaN" in history.failed["b"].reason, history.failed["b"].reason
    assert (history.failed["b"].epoch, history.failed["b"].step) == (1, 2), history.failed["b"]
    expected = weights_alone(case, "dropout", "a", own=True, shuffle=False)
    check_same(case, fleet["a"], expected, "the member beside a sick one")
    expected = trained_alone(case, "dropout", "b", good, epochs=1, shuffle=False)
    check_same(case, fleet["b"], expected, "the member set aside, after its last good step")


def failing_data_are_set_aside(case: Case) -> None:
    """Check that a member whose data raise is named and keeps what it learnt, and the others are not affected."""

    def batches(name: str) -> Callable[[], Iterator[Data]]:
        def read() -> Iterator[Data]:
            x, y = own_data(case, name, EVEN)
            for start in range(0, len(x), BATCH):
                if name == "b" and start == BATCH:
                    raise OSError("the disk is gone")
                yield x[start : start + BATCH], y[start : start + BATCH]

        return read

    fleet = make_fleet(case, dict.fromkeys("ba", "dropout"), lr=RATES)
    history = fleet.fit(mf.each({name: batches(name) for name in "ba"}), epochs=2, progress=False)
    assert set(history.failed) == {"b"}, f"expected 'b' to be set aside alone, got {history.failed}"
    assert "the disk is gone" in history.failed["b"].reason, history.failed["b"].reason
    expected = weights_alone(case, "dropout", "a", own=True, shuffle=False)
    check_same(case, fleet["a"], expected, "the member beside one whose data failed")


# --- models ------------------------------------------------------------------------------------------------------


def plain_in_plain_out(case: Case) -> None:
    """Check that models come out of a fleet as they went in, with new weights."""
    kinds_of = {"a": "dropout", "b": "dropout", "c": "unlike"}
    models = {name: case.make(kind, seed_of(name)) for name, kind in kinds_of.items()}
    kinds = {name: type(model) for name, model in models.items()}
    before = {name: case.weights(model) for name, model in models.items()}
    fleet = mf.Fleet(models)
    case.compile(fleet, RATES["a"])
    fit(fleet, case.data(0, EVEN))
    for name, model in models.items():
        assert type(fleet[name]) is kinds[name], f"{name!r} is a {type(fleet[name]).__name__} now"
        if case.in_place:
            assert fleet[name] is model, f"{name!r} is another object now"
        after = case.weights(fleet[name])
        assert after.keys() == before[name].keys(), f"{name!r} has other weights now: {', '.join(after)}"
        assert distance(after, before[name])[0] > 10 * case.tolerance, f"{name!r} has its old weights"


def saved_and_loaded(case: Case) -> None:
    """Check that a saved fleet is loaded with exactly the weights that it had."""
    fleet = make_fleet(case, {"a": "batchnorm", "b": "batchnorm"}, lr=RATES)
    x, y = case.data(0, EVEN)
    fit(fleet, (x, y))
    with tempfile.TemporaryDirectory() as folder:
        fleet.save(Path(folder) / "fleet")
        loaded = mf.load(Path(folder) / "fleet", factory=partial(case.make, "batchnorm", 99))
    assert loaded.names == fleet.names
    outputs = loaded.predict(x, batch_size=BATCH)
    for name in fleet.names:
        difference, where = distance(weight_arrays(case, loaded[name]), weight_arrays(case, fleet[name]))
        assert difference == 0, f"{where} of {name!r} came back changed by {difference:.1e}"
        expected = case.outputs(fleet[name], x)
        check_near(outputs[name], expected, case.tolerance, f"outputs of member {name!r}")


def members_come_and_go(case: Case) -> None:
    """Check that members that are dropped, added and cloned between fits leave the others as they are."""
    data = case.data(0, EVEN)
    fleet = make_fleet(case, dict.fromkeys("ab", "dropout"), lr=RATES["a"])
    fit(fleet, data)
    fleet.clone("a", as_="twin")
    check_same(case, fleet["twin"], case.weights(fleet["a"]), "a clone")
    leaver = fleet.drop("b")
    expected = weights_alone(case, "dropout", "b", lr=RATES["a"], epochs=1)
    check_same(case, leaver, expected, "the member that left")
    fleet.add("c", case.make("dropout", seed_of("c")))
    assert fleet.names == ["a", "twin", "c"]
    fit(fleet, data)
    check_same(case, fleet["a"], weights_alone(case, "dropout", "a"), "the member that stayed")
    check_same(
        case, fleet["c"], weights_alone(case, "dropout", "c", lr=RATES["a"], epochs=1), "the member that came"
    )
    apart = distance(case.weights(fleet["twin"]), case.weights(fleet["a"]))[0]
    assert apart > 10 * case.tolerance, "a clone has shuffles and dropout of its own, but went the same way"


# --- nothing lost ------------------------------------------------------------------------------------------------


class _Killed(Exception):  # noqa: N818
    """Interrupts a run."""


class _Die(mf.Callback):
    """Interrupts a fit after a step, as a fault of the machine would."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        """Raise after the step."""
        if self.step is not None and run.step >= self.step:  # a turn may be of several steps
            raise _Killed


def resumed_as_unbroken(case: Case) -> None:
    """Check that a run that is interrupted and started again ends like the uninterrupted one."""
    kinds = {"a": "dropout", "b": "dropout", "c": "batchnorm"}
    data = {name: own_data(case, name, BATCH if name == "b" else EVEN) for name in kinds}

    def run(*callbacks: mf.Callback) -> tuple[mf.Fleet, mf.History]:
        fleet = make_fleet(case, kinds, lr=RATES)
        return fleet, fit(fleet, mf.each(data), epochs=3, callbacks=callbacks)

    with tempfile.TemporaryDirectory() as folder:
        unbroken, history = run()
        with suppress(_Killed):
            run(mf.Checkpoint(folder, every_steps=1), _Die(5))
            raise AssertionError("the run should have been interrupted at its fifth step, but has fewer")
        resumed, other = run(mf.Checkpoint(folder, every_steps=1), _Die(None))
    for name in kinds:
        check_same(case, resumed[name], case.weights(unbroken[name]), f"member {name!r} of the resumed run")
        check_near(other[name]["loss"], history[name]["loss"], case.tolerance, f"losses of member {name!r}")


# --- all checks --------------------------------------------------------------------------------------------------


def _check(function: Callable[..., None], *choices: str) -> Check:
    """Return a check with its choices made. The choices are in its name, which pytest shows."""
    names = [name for name in function.__annotations__ if name not in ("case", "return")]
    made = update_wrapper(partial(function, **dict(zip(names, choices, strict=True))), function)
    made.__name__ = "-".join([function.__name__, *choices])  # pyrefly: ignore
    return made


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

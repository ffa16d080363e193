"""Verbs that are called while another is under way: in callbacks, by loaders, and from other threads."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import close, equal, fit, mlp, toy, weights
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.types import Strategy

X, Y = toy(24)
XV, YV = toy(15, seed=1)


def models(widths: tuple[int, ...] = (6, 6, 5)) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {f"m{number}": mlp(width) for number, width in enumerate(widths)}


def given(widths: tuple[int, ...] = (6, 6, 5), **recipe: Any) -> mf.Fleet:
    """A fleet of models that somebody else holds."""
    fleet = mf.Fleet(models(widths))
    whole: dict[str, Any] = {"optimizer": "adam", "loss": "cross_entropy", "lr": 0.02, **recipe}
    fleet.compile(**whole)
    return fleet


def plain(epochs: int, widths: tuple[int, ...] = (6, 6, 5), rows: int = 8) -> dict[str, list[nn.Module]]:
    """Every member's model after each epoch, by a plain loop in the order of the rows."""
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    found: dict[str, list[nn.Module]] = {}
    for name, model in models(widths).items():
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        found[name] = []
        for _ in range(epochs):
            for low in range(0, len(x), rows):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[low : low + rows]), y[low : low + rows]).backward()
                optimizer.step()
            kept = mlp(model[0].out_features)  # type: ignore[index]
            kept.load_state_dict(model.state_dict())
            found[name].append(kept)
    return found


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(torch.from_numpy(XV)), torch.from_numpy(YV)))


class Looks(mf.Callback):
    """Calls every verb that reads, at every moment, and compares it with the plain loop's models."""

    def __init__(self, expected: dict[str, list[nn.Module]], folder: Path, begun: dict[str, nn.Module]) -> None:
        self.expected, self.folder, self.begun = expected, folder, begun
        self.moments = 0

    def on_fit_start(self, run: Any) -> None:
        self.look(run, self.begun)

    def on_epoch_end(self, run: Any) -> None:
        self.look(run, {name: expected[run.epoch - 1] for name, expected in self.expected.items()})

    def on_fit_end(self, run: Any) -> None:
        self.look(run, {name: expected[-1] for name, expected in self.expected.items()})

    def look(self, run: Any, expected: dict[str, nn.Module]) -> None:
        evaluated = run.fleet.evaluate((XV, YV))
        predicted = run.fleet.predict(XV, batch_size=4)
        run.fleet.plan((X, Y))
        run.fleet.plan()
        run.fleet.save(self.folder)
        saved = mf.load(self.folder, lambda: mlp(6), members=["m0"])["m0"]
        assert close(weights(saved), weights(expected["m0"]))
        for name, model in expected.items():
            assert evaluated[name]["loss"] == pytest.approx(loss_of(model), rel=1e-4)
            with torch.no_grad():
                output = model(torch.from_numpy(XV)).numpy()
            assert np.allclose(predicted[name], output, atol=1e-5)
            assert close(weights(run.fleet[name]), weights(model))
        self.moments += 1


@pytest.mark.parametrize("strategy", ["auto", "interleaved", "threads", "processes"])
def test_verbs_in_a_callback_see_the_weights_of_now_and_leave_the_training_alone(
    strategy: Strategy, tmp_path: Path
) -> None:
    expected = plain(3)
    looks = Looks(expected, tmp_path, models())
    fleet = given()
    history = fit(
        fleet,
        (X, Y),
        epochs=3,
        batch_size=8,
        shuffle=False,
        callbacks=[looks],
        strategy=strategy,
        validation=(XV, YV),
    )
    assert looks.moments == 5
    for name, epochs in expected.items():
        assert close(weights(fleet[name]), weights(epochs[-1]))
        assert history[name]["val_loss"] == pytest.approx([loss_of(model) for model in epochs], rel=1e-4)
    again = fleet.evaluate((XV, YV))
    assert again["m2"]["loss"] == pytest.approx(loss_of(expected["m2"][-1]), rel=1e-4)


@pytest.mark.parametrize("strategy", ["auto", "threads", "processes"])
def test_verbs_after_a_step_see_the_weights_of_that_step(strategy: Strategy) -> None:
    class AfterSteps(mf.Callback):
        def __init__(self) -> None:
            self.seen: list[dict[str, Any]] = []

        def on_step_end(self, run: Any) -> None:
            self.seen.append(run.fleet.evaluate((XV, YV)))

    looks = AfterSteps()
    fleet = given()
    fit(fleet, (X, Y), epochs=2, batch_size=24, shuffle=False, callbacks=[looks], strategy=strategy)
    for name, after in plain(2, rows=24).items():
        known = np.array([loss_of(model) for model in (models()[name], *after)])
        steps = [int(np.abs(known - seen[name]["loss"]).argmin()) for seen in looks.seen]
        assert [known[step] for step in steps] == pytest.approx(
            [seen[name]["loss"] for seen in looks.seen], rel=1e-4
        )
        assert steps == sorted(steps)
        assert {1, 2} <= set(steps)
        assert steps[-1] == 2
        assert close(weights(fleet[name]), weights(after[-1]))


def test_verbs_in_a_callback_know_members_that_stopped_or_failed() -> None:
    expected = plain(4, widths=(6, 6, 6, 6))
    x = np.stack([X, X, X, X])
    x[1, 10] = np.nan

    class Stops(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            if run.epoch == 1:
                run.stop("m0")
                run.stop("m2")
            found = run.fleet.predict(XV)
            for name, epochs in (("m0", 1), ("m2", 1), ("m3", run.epoch)):
                with torch.no_grad():
                    output = expected[name][epochs - 1](torch.from_numpy(XV)).numpy()
                assert np.allclose(found[name], output, atol=1e-5), name
            assert np.isfinite(found["m1"]).all()

    fleet = given((6, 6, 6, 6))
    data = mf.each([(own, Y) for own in x])
    history = fit(fleet, data, epochs=4, batch_size=8, shuffle=False, callbacks=[Stops()])
    assert list(history.failed) == ["m1"]
    assert close(weights(fleet["m3"]), weights(expected["m3"][-1]))
    assert close(weights(fleet["m0"]), weights(expected["m0"][0]))


def test_a_model_that_a_callback_changed_is_taken_into_the_training() -> None:
    class Halves(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            with torch.no_grad():
                for parameter in run.fleet["m1"].parameters():
                    parameter.mul_(0.5)
            run.take("m1")

    fleet = given()
    fit(fleet, (X, Y), epochs=1, batch_size=8, shuffle=False, callbacks=[Halves()])
    expected = weights(plain(1)["m1"][0])
    assert close(weights(fleet["m1"]), {name: value / 2 for name, value in expected.items()})


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("fit", lambda fleet: fit(fleet, (X, Y))),
        ("compile", lambda fleet: fleet.compile("sgd", "cross_entropy", lr=0.1)),
        ("add", lambda fleet: fleet.add("new", mlp(6))),
        ("drop", lambda fleet: fleet.drop("m0")),
        ("clone", lambda fleet: fleet.clone("m0", as_="new")),
    ],
)
def test_verbs_that_change_the_fleet_are_refused_in_a_callback(verb: str, call: Callable[[mf.Fleet], Any]) -> None:
    class Calls(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            call(run.fleet)

    fleet = given()
    with pytest.raises(mf.BusyError, match=rf"fleet\.{verb} was called within fleet\.fit"):
        fit(fleet, (X, Y), epochs=3, batch_size=8, shuffle=False, callbacks=[Calls()])
    for name, epochs in plain(1).items():
        assert close(weights(fleet[name]), weights(epochs[0]))
    fit(fleet, (X, Y), batch_size=8, shuffle=False)
    for name, epochs in plain(2).items():
        assert close(weights(fleet[name]), weights(epochs[1]))


@pytest.mark.parametrize("strategy", ["interleaved", "threads", "processes"])
def test_after_a_callback_that_raises_the_models_hold_what_was_trained(strategy: Strategy) -> None:
    class Raises(mf.Callback):
        history: Any

        def on_epoch_end(self, run: Any) -> None:
            self.history = run.history
            if run.epoch == 2:
                raise ValueError("enough")

    raises = Raises()
    fleet = given()
    with pytest.raises(ValueError, match="enough"):
        fit(fleet, (X, Y), epochs=5, batch_size=8, shuffle=False, callbacks=[raises], strategy=strategy)
    assert raises.history.epochs == 2
    expected = plain(3)
    for name, epochs in expected.items():
        assert close(weights(fleet[name]), weights(epochs[1]))
    fit(fleet, (X, Y), batch_size=8, shuffle=False, strategy=strategy)
    for name, epochs in expected.items():
        assert close(weights(fleet[name]), weights(epochs[2]))


def test_a_callback_that_does_not_wait_may_not_look_at_members_that_are_training() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[Any]:
        begun.set()
        assert go_on.wait(60)
        yield torch.from_numpy(X), torch.from_numpy(Y)

    class Looks(mf.Callback):
        together = False
        said = ""

        def on_epoch_end(self, run: Any) -> None:
            if run.active == ("m0",):
                assert begun.wait(60)
                assert close(weights(run.fleet["m0"]), weights(expected))
                with pytest.raises(mf.BusyError) as caught:
                    run.fleet.evaluate((XV, YV))
                self.said = str(caught.value)
                go_on.set()

    expected = plain(1, rows=24)["m0"][0]
    fleet = given((6, 5))
    looks = Looks()
    opened = [0]

    def later() -> Iterator[Any]:
        opened[0] += 1
        if opened[0] == 1:  # looked into before the fit
            yield torch.from_numpy(X), torch.from_numpy(Y)
            yield from slow()
        else:
            yield from slow()

    data = mf.each({"m0": [(torch.from_numpy(X), torch.from_numpy(Y))], "m1": later})
    fit(fleet, data, strategy="threads", callbacks=[looks])
    assert "'m1' is in the middle of an epoch" in looks.said
    assert "together = True" in looks.said


def test_reading_verbs_from_several_threads_give_the_answers_of_one() -> None:
    fleet = given((6, 6, 5, 4))
    short, long = XV[:3], np.concatenate([XV, XV])
    expected = {size: given((6, 6, 5, 4)).predict(x) for size, x in ((3, short), (30, long))}
    losses = given((6, 6, 5, 4)).evaluate((XV, YV))
    untouched = weights(models((6, 6, 5, 4))["m2"])  # made here: torch's seed is one for all threads
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                x = short if number % 2 else long
                found = fleet.predict(x, batch_size=7 + number)
                for name, output in expected[len(x)].items():
                    assert np.allclose(found[name], output, atol=1e-5)
                evaluated = fleet.evaluate((XV, YV), batch_size=4 + number)
                assert evaluated["m1"]["loss"] == pytest.approx(losses["m1"]["loss"], rel=1e-4)
                fleet.plan()
                assert equal(weights(fleet["m2"]), untouched)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    fit(fleet, (X, Y), epochs=2, batch_size=8, shuffle=False)
    assert close(weights(fleet["m1"]), weights(plain(2, (6, 6, 5, 4))["m1"][-1]))


def test_every_verb_of_another_thread_is_refused_during_a_fit(tmp_path: Path) -> None:
    calls: dict[str, Callable[[mf.Fleet], Any]] = {
        "predict": lambda fleet: fleet.predict(XV),
        "evaluate": lambda fleet: fleet.evaluate((XV, YV)),
        "plan": lambda fleet: fleet.plan(),
        "save": lambda fleet: fleet.save(tmp_path / "kept"),
        "['m0']": lambda fleet: fleet["m0"],
        "fit": lambda fleet: fit(fleet, (X, Y)),
        "compile": lambda fleet: fleet.compile("sgd", "cross_entropy", lr=0.1),
        "add": lambda fleet: fleet.add("new", mlp(6)),
        "drop": lambda fleet: fleet.drop("m0"),
        "clone": lambda fleet: fleet.clone("m0", as_="new"),
    }
    said: dict[str, str] = {}

    class Elsewhere(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            def work() -> None:
                for verb, call in calls.items():
                    try:
                        call(run.fleet)
                    except mf.BusyError as error:
                        said[verb] = str(error)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

    fleet = given()
    fit(fleet, (X, Y), epochs=2, batch_size=8, shuffle=False, callbacks=[Elsewhere()])
    assert said.keys() == calls.keys()
    assert all("while another thread is in fleet.fit" in text for text in said.values())
    assert close(weights(fleet["m0"]), weights(plain(2)["m0"][-1]))


def test_a_loader_that_asks_the_fleet_that_reads_it_is_refused_and_does_not_wait_for_ever() -> None:
    fleet = given()

    def batches() -> Iterator[Any]:
        yield torch.from_numpy(X), torch.from_numpy(Y)
        fleet.predict(XV)

    with pytest.raises(mf.BusyError, match="by a loader"):
        fleet.evaluate(batches)
    with pytest.raises(mf.BusyError, match=r"another thread is in fleet\.fit"):
        fit(fleet, batches)
    assert fleet.predict(XV).keys() == {"m0", "m1", "m2"}


def test_a_loader_may_ask_the_fleet_before_its_first_batch() -> None:
    fleet = given()

    def batches() -> Iterator[Any]:
        found = fleet.predict(X)
        yield torch.from_numpy(X), torch.from_numpy(found["m0"].argmax(1))

    fit(fleet, batches, epochs=1)
    before = models()
    labels = before["m0"](torch.from_numpy(X)).argmax(1)
    optimizer = torch.optim.Adam(before["m1"].parameters(), lr=0.02)
    nn.functional.cross_entropy(before["m1"](torch.from_numpy(X)), labels).backward()
    optimizer.step()
    assert close(weights(fleet["m1"]), weights(before["m1"]))


class _Named(nn.Module):
    """Names its outputs in an order, or by names, that depend on the batch."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 3), other

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = {"plus": self.layer(x), "minus": -self.layer(x)}
        return found if len(x) > 4 else dict(sorted(found.items())) | ({self.other: x} if self.other else {})


def test_predicting_joins_outputs_by_their_keys() -> None:
    fleet = mf.Fleet({"a": _Named(""), "b": _Named("")})
    x = np.random.default_rng(0).standard_normal((9, 8)).astype(np.float32)
    for name, found in fleet.predict(x, batch_size=5).items():
        with torch.no_grad():
            expected = fleet[name].layer(torch.from_numpy(x)).numpy()
        assert np.allclose(found["plus"], expected, atol=1e-6)
        assert np.allclose(found["minus"], -expected, atol=1e-6)
    with pytest.raises(mf.InputError, match=r"member 'a': its outputs for 2 batches can't be joined.*'odd'"):
        mf.Fleet({"a": _Named("odd")}).predict(x, batch_size=5)


def test_an_interrupt_in_a_reading_verb_leaves_the_fleet_as_it_was() -> None:
    fleet = given()
    fit(fleet, (X, Y), epochs=1, batch_size=8, shuffle=False)

    def batches() -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        fleet.predict(batches)
    thread = threading.Thread(target=lambda: fleet.predict(XV))
    thread.start()
    thread.join()
    fit(fleet, (X, Y), epochs=1, batch_size=8, shuffle=False)
    for name, epochs in plain(2).items():
        assert close(weights(fleet[name]), weights(epochs[1]))

"""Python state that a fused program could freeze: watched, and traced anew or not fused where it changes."""

import functools
import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.frameworks.torch import comparing
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf

SCALE = 1.0
SETTINGS = SimpleNamespace(scale=1.0)
RNG = np.random.default_rng(0)
COUNT = itertools.count()


class Constants:
    """Holds a number that a callback changes."""

    scale = 1.0


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def ordinary(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class After(mf.Callback):
    """Calls a function after every epoch."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_epoch_end(self, run: Any) -> None:
        self.function()


def annealed(where: str) -> tuple[Any, Any, Any]:
    """An objective that reads a number, a function that changes it, and one that sets it back."""
    cell, box = 1.0, {"scale": [1.0]}

    def read() -> float:
        if where == "a closure":
            return cell
        if where == "a dict":
            return box["scale"][0]
        if where == "a global":
            return SCALE
        return SETTINGS.scale if where == "an object" else Constants.scale

    def put(value: float) -> None:
        nonlocal cell
        global SCALE
        cell = SCALE = Constants.scale = SETTINGS.scale = value
        box["scale"][0] = value

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return ordinary(model, batch) * read()

    return objective, lambda: put(read() * 0.5), lambda: put(1.0)


@pytest.mark.parametrize("where", ["a closure", "a dict", "a global", "an object", "a class"])
def test_a_value_that_a_callback_anneals_is_read_anew_in_every_epoch(where: str) -> None:
    objective, anneal, start = annealed(where)
    data, models = comparing.rows(), comparing.build(mlp, 2)
    expected = comparing.plainly(models, objective, data, epochs=3, after_epoch=anneal, before=start)
    start()
    fleet = comparing.compiled(models, objective=objective)
    comparing.fit(fleet, data, epochs=3, callbacks=[After(anneal)])
    start()
    assert comparing.reason(fleet, data) is None
    comparing.assert_equal(models, expected)


class Curriculum:
    """Has a value of its class, until it is given one of its own."""

    scale = 1.0

    def now(self) -> float:
        return self.scale


def test_a_value_of_a_class_that_an_object_is_given_in_a_callback_is_read() -> None:
    curriculum = Curriculum()

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return ordinary(model, batch) * curriculum.now()

    def change() -> None:
        curriculum.scale = 0.25

    data, models = comparing.rows(), comparing.build(mlp, 2)
    start = vars(curriculum).clear
    expected = comparing.plainly(models, objective, data, epochs=3, after_epoch=change, before=start)
    start()
    fleet = comparing.compiled(models, objective=objective)
    comparing.fit(fleet, data, epochs=3, callbacks=[After(change)])
    comparing.assert_equal(models, expected)


class Scaled(nn.Module):
    """Reads an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_an_attribute_that_changes_between_epochs_and_fits_counts() -> None:
    data, models = comparing.rows(), comparing.build(Scaled, 2)
    expected = comparing.plainly(models, ordinary, data, epochs=2)
    fleet = comparing.compiled(models, loss="cross_entropy")
    comparing.fit(fleet, data, epochs=2)
    comparing.assert_equal(models, expected)

    def change(scale: float) -> None:
        for model in models:
            assert isinstance(model, Scaled)
            model.scale = scale

    change(3.0)
    assert abs(fleet.predict(data[0])["0"] - models[0](data[0]).detach().numpy()).max() < 1e-12
    losses = []

    class Change(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            change(2.0)

    comparing.fit(fleet, data, epochs=2, callbacks=[Change()])
    assert not losses
    outputs = fleet.predict(data[0])
    for place, model in enumerate(models):
        assert abs(outputs[str(place)] - model(data[0]).detach().numpy()).max() < 1e-12


def test_a_state_that_comes_back_is_not_traced_again() -> None:
    from modelfleet.frameworks.torch.fused.programs import Programs

    traced: list[str] = []
    original = Programs._make

    def counting(self: Programs, kind: str, *args: Any) -> Any:
        traced.append(kind)
        return original(self, kind, *args)

    box = {"scale": 1.0}

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return ordinary(model, batch) * box["scale"]

    def flip() -> None:
        box["scale"] = 3.0 - box["scale"]

    data, models = comparing.rows(), comparing.build(mlp, 2)
    fleet = comparing.compiled(models, objective=objective)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "_make", counting)
        comparing.fit(fleet, data, epochs=6, callbacks=[After(flip)])
    assert traced == ["packed_gradients", "packed_apply"] * 2


def test_a_model_is_tried_out_again_only_if_what_it_reads_has_changed() -> None:
    from modelfleet.frameworks.torch.fused.programs import Programs

    tried: list[bool] = []
    original = Programs.trial

    def counting(self: Programs, *, train: bool) -> Any:
        tried.append(train)
        return original(self, train=train)

    box = {"width": 3}

    class Cut(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)[:, : box["width"]]

    (x, _), fleet = comparing.rows(), mf.Fleet([Cut(4, 3), Cut(4, 3)])
    x = x[:, :4].float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "trial", counting)
        for _ in range(3):
            assert fleet.predict(x)["0"].shape == (len(x), 3)
        before = len(tried)
        assert fleet.predict(x)["0"].shape == (len(x), 3)
        assert len(tried) == before
        box["width"] = 2
        assert fleet.predict(x)["0"].shape == (len(x), 2)
    assert len(tried) == before + 1


class Counting(nn.Module):
    """Counts its calls, and goes by them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) / self.calls


class Keeping(nn.Module):
    """Leaves something in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.last: Tensor | None = None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        self.seen.append(self.last)
        return self.last


class Chance(nn.Module):
    """Leaves out its layer by chance, as stochastic depth does."""

    def __init__(self, draw: Any = random.random) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2.0 if self.draw() < 0.5 else 1.0)


class Seeding(nn.Module):
    """Seeds torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return self.layer(x)


class OwnGenerator(nn.Module):
    """Draws with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return self.layer(x + torch.randn(4, generator=generator, dtype=x.dtype))


class Advancing(nn.Module):
    """Advances an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.steps = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * next(self.steps)


class Switching(nn.Module):
    """Switches a part of itself to evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        output = self.drop(self.layer(x))
        self.drop.eval()
        return output


def hooked() -> nn.Module:
    model = mlp()
    model.get_parameter("0.weight").register_hook(lambda gradient: gradient * 2)
    return model


def hooked_after() -> nn.Module:
    model = mlp()
    model.get_parameter("0.weight").register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def hooked_backward() -> nn.Module:
    model = mlp()
    model[0].register_full_backward_hook(lambda *_: None)
    return model


def hooked_forward() -> nn.Module:
    model = mlp()
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(1))
    return model


MODELS = {
    Counting: "running it changes self.calls",
    Keeping: "running it changes self.last",
    Chance: "it draws from Python's random",
    functools.partial(Chance, np.random.rand): "it draws from numpy.random",
    functools.partial(Chance, RNG.random): "running it changes",
    Seeding: "it seeds torch's generator",
    OwnGenerator: "it draws random numbers with a generator of its own",
    Advancing: "attribute steps of type count can't be compared",
    Switching: "its forward switches drop between train and eval mode",
    hooked: "its parameter 0.weight has a hook on its gradient",
    hooked_after: "its parameter 0.weight has a hook on its gradient",
    hooked_backward: "0 has a backward hook",
    hooked_forward: "running it changes self.0's hook's seen",
}


@pytest.mark.parametrize("make", MODELS)
def test_a_model_with_state_in_python_is_not_fused_and_keeps_its_state(make: Any) -> None:
    models = comparing.build(make, 2)
    before = [{name: dict(vars(part)) for name, part in model.named_modules()} for model in models]
    chance = random.getstate(), torch.get_rng_state(), str(np.random.get_state()), RNG.bit_generator.state
    fleet = comparing.compiled(models, loss="cross_entropy")
    assert MODELS[make] in str(comparing.reason(fleet, comparing.rows()))
    for model, expected in zip(models, before, strict=True):
        for name, part in model.named_modules():
            assert vars(part) == expected[name]
            assert not getattr(part, "seen", None)
    assert random.getstate() == chance[0]
    assert torch.equal(torch.get_rng_state(), chance[1])
    assert str(np.random.get_state()) == chance[2]
    assert RNG.bit_generator.state == chance[3]


def counted(model: nn.Module, batch: Any) -> Tensor:
    return ordinary(model, batch) * (1 + next(COUNT))


CALLS = {"objective": 0}


def counted_by_hand(model: nn.Module, batch: Any) -> Tensor:
    CALLS["objective"] += 1
    return ordinary(model, batch) / CALLS["objective"]


OBJECTIVES = {counted: "the global COUNT, an iterator", counted_by_hand: "the global CALLS['objective']"}


@pytest.mark.filterwarnings("ignore:members .* take turns:modelfleet.FleetWarning")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_with_state_is_not_fused(objective: Any) -> None:
    fleet = comparing.compiled(comparing.build(mlp, 2), objective=objective)
    assert OBJECTIVES[objective] in str(comparing.reason(fleet, comparing.rows()))
    assert CALLS == {"objective": 0}


class Biased(nn.Module):
    """Keeps what it has computed while it evaluates, and forgets it when it trains, as timm's LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(4, 3), nn.Parameter(torch.randn(2))
        self.cache: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> "Biased":
        super().train(mode)
        if mode and self.cache:
            self.cache = {}
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            bias = self.bias[[0, 1, 1]]
        else:
            if "cpu" not in self.cache:
                self.cache["cpu"] = self.bias[[0, 1, 1]]
            bias = self.cache["cpu"]
        return self.layer(x) + bias


@pytest.mark.parametrize("filled", [False, True])
def test_a_cache_that_training_empties_stays_fused_and_never_stale(filled: bool) -> None:
    data, models = comparing.rows(), comparing.build(Biased)
    expected = comparing.plainly(models, ordinary, data)
    if filled:
        with torch.no_grad():
            for model in models:
                model.eval()(data[0])
    fleet = comparing.compiled(models, loss="cross_entropy")
    comparing.fit(fleet, data, validation=data)
    assert comparing.reason(fleet, data) is None
    comparing.assert_equal(models, expected)
    outputs = fleet.predict(data[0])
    for place, (model, other) in enumerate(zip(models, expected, strict=True)):
        alone = other.eval()(data[0]).detach().numpy()
        assert abs(outputs[str(place)] - alone).max() < 1e-12
        assert abs(model.eval()(data[0]).detach().numpy() - alone).max() < 1e-12
    comparing.fit(fleet, data)
    assert comparing.reason(fleet, data) is None

"""Models that a user holds and changes between two verbs: every change is seen, and nothing else is read again."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.helpers import mlp
from torch import nn

import modelfleet as mf
from modelfleet.frameworks.torch.fused.engine import FusedEngine
from modelfleet.frameworks.torch.stamps import MAX_BYTES, ModelStamp, ModelStamps

X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


class Scaled(nn.Module):
    """A model with Python values that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = 1.0
        self.factors = [1.0, 2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * self.scale * self.factors[1]


def _in_place(model: Scaled) -> None:
    with torch.no_grad():
        model.layer.weight.add_(1.0)


def _by_data(model: Scaled) -> None:
    model.layer.weight.data[0, 0] += 1.0


def _by_numpy(model: Scaled) -> None:
    model.layer.bias.detach().numpy()[0] += 1.0


def _new_data(model: Scaled) -> None:
    model.layer.weight.data = model.layer.weight.data * 2.0


def _other_shapes(model: Scaled) -> None:
    model.layer, model.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)


def _load(model: Scaled) -> None:
    model.load_state_dict(Scaled().state_dict())


def _new_parameter(model: Scaled) -> None:
    model.layer.weight = nn.Parameter(torch.ones(3, 4))


def _new_module(model: Scaled) -> None:
    model.layer = nn.Linear(4, 3)


def _buffer(model: Scaled) -> None:
    assert model.norm.running_mean is not None
    model.norm.running_mean += 1.0


def _attribute(model: Scaled) -> None:
    model.scale = 3.0


def _in_list(model: Scaled) -> None:
    model.factors[1] = 5.0


def _hook(model: Scaled) -> None:
    model.layer.register_forward_hook(lambda module, args, output: output + 1.0)


def _frozen(model: Scaled) -> None:
    model.layer.weight.requires_grad_(False)


def _sign_of_zero(model: Scaled) -> None:
    model.layer.bias.data[:] = -model.layer.bias.data


def _mode(model: Scaled) -> None:
    model.norm.eval()


def _deleted(model: Scaled) -> None:
    model.layer.bias = None  # pyrefly: ignore


CHANGES = [_in_place, _by_data, _by_numpy, _new_data, _other_shapes, _load, _new_parameter, _new_module, _buffer]
CHANGES += [_attribute, _in_list, _hook, _frozen, _sign_of_zero, _mode, _deleted]


@pytest.mark.parametrize("change", CHANGES)
def test_a_stamp_sees_every_change(change: Callable[[Scaled], None]) -> None:
    model = Scaled()
    with torch.no_grad():
        model.layer.bias.zero_()
    stamp = ModelStamp(model)
    assert stamp.same(model)
    change(model)
    assert not stamp.same(model)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", [0, 1])
def test_predict_sees_every_change_of_a_model_that_a_user_holds(
    change: Callable[[Scaled], None], which: int
) -> None:
    torch.manual_seed(0)
    models = [Scaled(), Scaled(), Scaled()]
    fleet = mf.Fleet(models)
    for _ in range(2):
        fleet.predict(X)
    change(models[which])
    found = fleet.predict(X)
    for model, output in zip(models, found.values(), strict=True):
        alone = copy.deepcopy(model).eval()
        np.testing.assert_allclose(output, alone(torch.from_numpy(X)).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_only_models_that_have_changed_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = []
    gather = FusedEngine.gather

    def counted(self: FusedEngine, positions: list[int], members: list) -> None:
        read.append([member.name for member in members])
        gather(self, positions, members)

    monkeypatch.setattr(FusedEngine, "gather", counted)
    models = {name: mlp(6) for name in "abc"}
    fleet = mf.Fleet(models)
    x = np.zeros((2, next(models["a"].parameters()).shape[1]), np.float32)
    for _ in range(3):
        fleet.predict(x)
    assert read == []
    with torch.no_grad():
        next(models["b"].parameters()).mul_(2.0)
    fleet.predict(x)
    assert read == [["b"]]


def test_weights_that_a_user_puts_back_after_a_fit_are_used() -> None:
    models = {name: mlp(6) for name in "ab"}
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "cross_entropy", lr=0.5)
    x = np.random.default_rng(1).normal(size=(8, next(models["a"].parameters()).shape[1])).astype(np.float32)
    before = fleet.predict(x)
    saved = {name: copy.deepcopy(model.state_dict()) for name, model in models.items()}
    fleet.fit((x, np.zeros(8, np.int64)), epochs=2, progress=False)
    for name, model in models.items():
        model.load_state_dict(saved[name])
    after = fleet.predict(x)
    for name in models:
        np.testing.assert_array_equal(after[name], before[name])


def test_a_stamp_sees_new_strides_at_the_same_address() -> None:
    model = nn.Linear(4, 4)
    stamp = ModelStamp(model)
    model.weight.data = model.weight.data.t()
    assert not stamp.same(model)


def test_what_can_not_be_compared_quickly_counts_as_changed() -> None:
    large = nn.Linear(MAX_BYTES // 16, 8)
    holder = nn.Linear(2, 2)
    holder.note = {"a": 1}  # pyrefly: ignore
    counter = nn.Module()
    own = type("Own", (nn.Module,), {})()
    for model in (large, holder, own):
        assert not ModelStamp(model).same(model)
    assert ModelStamp(counter).same(counter)
    assert not ModelStamp(counter).same(nn.Module())


@pytest.mark.parametrize("change", CHANGES)
def test_stamps_of_several_models_see_every_change(change: Callable[[Scaled], None]) -> None:
    models = [Scaled(), Scaled(), Scaled()]
    with torch.no_grad():
        models[1].layer.bias.zero_()
    stamps = ModelStamps([ModelStamp(model) for model in models])
    assert stamps.same(models)
    assert not stamps.same(models[:2])
    assert not stamps.same([models[0], models[2], models[1]])
    change(models[1])
    assert not stamps.same(models)


def _equal_number(model: Scaled) -> None:
    model.scale = 1


def _equal_parameter(model: Scaled) -> None:
    model.layer.bias = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("change", [_equal_number, _equal_parameter])
def test_equal_is_not_enough_where_it_may_behave_differently(change: Callable[[Scaled], None]) -> None:
    model = Scaled()
    model.layer.bias = nn.Parameter(torch.zeros(1))
    stamp = ModelStamp(model)
    assert stamp.same(model)
    change(model)
    assert not stamp.same(model)

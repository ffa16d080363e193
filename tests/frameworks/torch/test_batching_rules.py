"""Operations that are computed another way while members are stacked give what torch gives alone."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.frameworks.torch import numbers
from tests.frameworks.torch.test_numbers import Forward
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import modelfleet as mf
from modelfleet.types import Precision, Strategy

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Noted(nn.Module):
    """A layer, with the dtype of what it gave last in a buffer."""

    kind: Tensor

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("kind", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x)
        result = result[0] if isinstance(result, tuple) else result
        self.kind = torch.full_like(self.kind, KINDS[result.dtype])
        return result


KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
NORMS: dict[str, Callable[[], list[nn.Module]]] = {
    "LayerNorm": lambda: [nn.LayerNorm(8)],
    "BatchNorm": lambda: [nn.BatchNorm1d(8)],
    "BatchNorm of channels": lambda: [nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten()],
    "GroupNorm": lambda: [nn.GroupNorm(2, 8)],
    "InstanceNorm": lambda: [nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()],
}


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_in_half_precision_are_those_of_plain_autocast(norm: str, precision: Precision) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), *map(Noted, NORMS[norm]()), nn.SiLU(), nn.Linear(8, 3))

    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    models = [make() for _ in range(3)]
    plain = copy.deepcopy(models)
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "cross_entropy", lr=0.1, precision=precision)
    fleet.fit((x, y), epochs=3, batch_size=16, shuffle=False, strategy="fused", progress=False)
    for name, model in zip(fleet.names, plain, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
        for rows in (slice(0, 16), slice(16, 32)) * 3:
            with torch.autocast("cpu", HALVES[precision]):
                loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        bound = 1e-2 if precision == "bf16" else 1e-3
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(fleet[name].state_dict()[key], tensor, rtol=bound, atol=bound, msg=key)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("first", [nn.Identity, lambda: nn.Linear(6, 6)])
def test_recurrent_layers_in_half_precision_give_the_dtype_of_plain_autocast(
    layer: Callable[..., nn.Module], first: Callable[[], nn.Module]
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (2, 6)), first(), Noted(layer(6, 4)), nn.Flatten(), nn.Linear(8, 3))

    fleet = mf.Fleet([make(), make()])
    fleet.compile("sgd", "cross_entropy", lr=0.1, precision="bf16")
    x, y = torch.randn(4, 12), torch.randint(3, (4,))
    fleet.fit((x, y), batch_size=4, strategy="fused", progress=False)
    plain = make()
    with torch.autocast("cpu", torch.bfloat16):
        plain(x)
    assert fleet["0"].state_dict()["2.kind"] == plain.state_dict()["2.kind"]


IN_PLACE: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "clamp_": lambda x, _: (x * 1).clamp_(-0.3, 0.3) + torch.clamp_(x * 1, max=0.1),
    "addcmul_": lambda x, _: (x * 1).addcmul_(x, x, value=0.5).addcdiv_(x, x.abs() + 1),
    "lerp_": lambda x, _: (x * 1).lerp_(x.tanh(), 0.3),
    "powers": lambda x, _: (x.abs() + 0.1).pow_(torch.full_like(x, 1.5)) + x.sin().square_(),
    "sums": lambda x, _: (x * 1).cumsum_(1) + (x * 1).subtract_(x.sin(), alpha=0.5),
    "parts": lambda x, _: (x * 1).tril_() + x * (x.detach() * 1).gt_(torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_functions_in_place(name: str) -> None:
    numbers.check(lambda number: Forward(number, IN_PLACE[name]), [1, 1])


class Average(nn.Module):
    """Subtracts a running mean, which it moves in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.3)
        return self.last(x - self.mean)


def test_buffers_that_a_forward_moves_in_place() -> None:
    numbers.check(lambda _: Average(), [0, 0])


@pytest.mark.parametrize("axis", [0, 1, None])
def test_weight_norm(axis: Any) -> None:
    def make(_: object) -> nn.Module:
        first, last = nn.Linear(4, 8), nn.Linear(8, 3)
        return nn.Sequential(weight_norm(first, dim=axis), nn.Tanh(), weight_norm(last))

    numbers.check(make, [0, 0])


@pytest.mark.parametrize("layer", [nn.Dropout, nn.Dropout1d])
def test_dropout_at_a_rate_per_member_rounds_halves_as_alone(layer: Callable[[float], nn.Module]) -> None:
    def make(p: float) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (4, 2)), layer(p), nn.Flatten(), nn.Linear(8, 3))

    models = [numbers.build(make, [0.1, 0.3], torch.float32) for _ in range(2)]
    fleets = [numbers.compiled(own, optimizer="sgd", loss="cross_entropy", precision="bf16") for own in models]
    strategies: tuple[Strategy, Strategy] = ("fused", "interleaved")
    for fleet, strategy in zip(fleets, strategies, strict=True):
        fleet.fit(numbers.rows(dtype=torch.float32), epochs=2, batch_size=8, strategy=strategy, progress=False)
    for name in fleets[0].names:
        for key, tensor in fleets[0][name].state_dict().items():
            # A rate that is rounded differently would be off by 2e-3.
            torch.testing.assert_close(tensor, fleets[1][name].state_dict()[key], rtol=2e-4, atol=2e-5)

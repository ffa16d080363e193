"""Operations that are computed another way while members are stacked give what torch gives alone."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.types import Precision

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

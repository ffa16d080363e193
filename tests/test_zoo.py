"""Small models with traits of public architectures that once were not fused, or not equal; named by the trait."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.frameworks.torch.random.eager import EagerDraws
from modelfleet.members import member_seed


class BiasCache(nn.Module):
    """Attention whose bias is gathered anew in training and kept in a dict in evaluation, as in timm's LeViT,
    EfficientFormerV2, EfficientViT-M and TinyViT."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.biases = nn.Parameter(torch.zeros(2, 5))
        self.register_buffer("places", (torch.arange(4)[:, None] - torch.arange(4)).abs(), persistent=False)
        self.cache: dict[str, Tensor] = {}
        self.head = nn.Linear(6, 3)

    def train(self, mode: bool = True) -> "BiasCache":
        super().train(mode)
        if mode and self.cache:
            self.cache = {}
        return self

    def bias(self, device: torch.device) -> Tensor:
        if self.training:
            return self.biases[:, self.places]
        if str(device) not in self.cache:
            self.cache[str(device)] = self.biases[:, self.places]
        return self.cache[str(device)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.reshape(-1, 4, 6)).reshape(-1, 4, 3, 2, 3).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) + self.bias(x.device)).softmax(-1)
        return self.head((weights @ v).transpose(1, 2).reshape(-1, 4, 6).mean(1))


class FreshDraw(nn.Module):
    """A draw into a tensor that the forward has just made, as in torchvision's StochasticDepth."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(24, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.empty([x.shape[0], 1], dtype=x.dtype, device=x.device)
        if self.training:
            noise = noise.bernoulli_(0.7)
            noise.div_(0.7)
        else:
            noise.fill_(1.0)
        return self.head(x + self.layer(x) * noise)


class ChannelsLast(nn.Module):
    """Pools what has its channels last in memory, which torch does by `as_strided_`, as in timm's ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(1, 4, 2), nn.LayerNorm(4), nn.Linear(4, 3)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.stem(x.reshape(-1, 1, 4, 6)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(self.pool(hidden).flatten(1))


class TwoNames(nn.Module):
    """A module that is found by two names, and a weight that two modules have, as in timm's CoaT."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(24, 24)
        self.first = nn.Sequential(self.shared, nn.Tanh())
        self.second = nn.Sequential(self.shared, nn.BatchNorm1d(24))
        self.third = nn.Linear(24, 24)
        self.third.weight = self.shared.weight
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(x))))


@pytest.mark.parametrize("make", [BiasCache, FreshDraw, ChannelsLast, TwoNames])
def test_a_trait_of_a_public_architecture_is_fused_and_equal_fit_after_fit(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 24, dtype=torch.float64), torch.arange(12) % 3
    models = [make().double() for _ in range(3)]
    plain = copy.deepcopy(models)
    fleet = mf.Fleet(models, seed=4)
    fleet.compile("sgd", "cross_entropy", lr=0.1, momentum=0.9)
    answers = []
    for _ in range(2):
        fleet.fit((x, y), epochs=2, batch_size=6, shuffle=False, strategy="fused", progress=False)
        answers.append(fleet.predict(x, batch_size=12))
    for name, model in zip(fleet.names, plain, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(8):
            rows = slice(0, 6) if step % 2 == 0 else slice(6, 12)
            with EagerDraws(member_seed(4, name), step):
                loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 4 == 3:
                with torch.no_grad():
                    expected = model.eval()(x)
                model.train()
                found = torch.as_tensor(answers[step // 4][name])
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, check_dtype=False)
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(fleet[name].state_dict()[key], tensor, rtol=1e-9, atol=1e-11, msg=key)
        assert all(type(p) is nn.Parameter for p in fleet[name].parameters())

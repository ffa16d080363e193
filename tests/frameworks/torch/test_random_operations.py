"""Every way to draw: fused members draw what each draws as plain torch, by the documented definition."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.frameworks.torch.random.eager import EagerDraws
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.members import member_seed

from .test_random_streams import Reference

SEED, STEP = 77, 3


def stochastic_depth(x: Tensor) -> Tensor:
    """As torchvision has it: a draw into a fresh tensor."""
    noise = torch.empty([x.shape[0]] + [1] * (x.ndim - 1), dtype=x.dtype, device=x.device)
    noise = noise.bernoulli_(0.6)
    noise.div_(0.6)
    return x * noise


def drawn_after_making(x: Tensor) -> Tensor:
    noise = torch.zeros(x.shape, dtype=x.dtype)
    noise.normal_(0.0, 2.0)
    return x + noise


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randperm": lambda x: x[torch.randperm(len(x))],
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 3).to(x),
    "multinomial with replacement": lambda x: torch.multinomial(x.softmax(-1), 30, replacement=True).to(x),
    "Categorical": lambda x: torch.distributions.Categorical(logits=x, validate_args=False).sample().to(x),
    "normal, tensor and number": lambda x: torch.normal(x, 0.5),
    "normal, number and tensor": lambda x: torch.normal(0.5, x.exp()),
    "normal, tensors": lambda x: torch.normal(x, x[0].exp()),
    "normal, numbers": lambda x: x + torch.normal(0.5, 2.0, x.shape, dtype=x.dtype),
    "randint_like": lambda x: torch.randint_like(x, 9) + torch.randint_like(x, -3, 5),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "RReLU": lambda x: F.rrelu(x, training=True),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(1.0, 2.0),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.1, 0.2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1.0, 2.0),
    "random_": lambda x: torch.empty_like(x).random_() % 7 + x.clone().random_(9) + x.clone().random_(-3, 4),
    "dropout": lambda x: F.dropout(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3, True),
    "dropout2d": lambda x: F.dropout2d(x.reshape(1, *x.shape, 1).expand(2, -1, -1, 3), 0.3, True).sum((0, -1)),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.5) + F.gumbel_softmax(x, dim=0, hard=True),
    "StochasticDepth": stochastic_depth,
    "drawn after making": drawn_after_making,
}


class Drawing(nn.Module):
    """A layer around a draw."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layer = nn.Linear(5, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return self.head(hidden + DRAWS[self.name](hidden).reshape(len(x), -1).sum(1, keepdim=True))


@pytest.mark.parametrize("name", DRAWS)
def test_fused_members_draw_what_each_draws_as_plain_torch(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    models = {f"m{i}": Drawing(name).double() for i in range(3)}
    plain = copy.deepcopy(models)
    fleet = mf.Fleet(models, seed=5)
    fleet.compile("sgd", "mse", lr=1e-3)
    fleet.fit((x, y), epochs=2, batch_size=6, shuffle=False, strategy="fused", progress=False)
    for own, model in plain.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(4):
            rows = slice(0, 6) if step % 2 == 0 else slice(6, 12)
            with EagerDraws(member_seed(5, own), step):
                loss = F.mse_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for left, right in zip(fleet[own].parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


def draw(function: Callable[[], Any]) -> Any:
    with DrawFromStreams(Streams(torch.tensor(SEED), torch.tensor(STEP))):
        return function()


def double(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64)


def test_every_distribution_is_that_of_the_documented_definition() -> None:
    stream = Reference(SEED, STEP)
    u, n, words = stream.uniform(0, 20), stream.normal(0, 20), stream.wide(0, 20)
    close = lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)  # noqa: E731
    close(draw(lambda: double(20).exponential_(3.0)), -np.log1p(-u) / 3)
    close(draw(lambda: double(20).cauchy_(1.0, 2.0)), 1 + 2 * np.tan(np.pi * (u - 0.5)))
    close(draw(lambda: double(20).log_normal_(0.5, 0.1)), np.exp(0.5 + 0.1 * n))
    close(draw(lambda: double(20).geometric_(0.2)), np.maximum(np.ceil(np.log1p(-u) / np.log1p(-0.2)), 1))
    close(draw(lambda: torch.normal(torch.ones(20, dtype=torch.float64), 2.0)), 1 + 2 * n)
    close(draw(lambda: torch.randperm(20)), np.argsort(words.view(np.uint64)))
    close(draw(lambda: double(20).random_(5, 12)), 5 + words % 7)
    assert draw(lambda: torch.empty(20, dtype=torch.int64).random_()).tolist() == [
        int(word) % 2**63 for word in words
    ]
    assert draw(lambda: torch.empty(20, dtype=torch.int64).random_(-(2**63), None)).tolist() == words.tolist()
    x = torch.linspace(-1, 1, 20, dtype=torch.float64)
    close(
        draw(lambda: F.rrelu(x, 0.1, 0.5, training=True)),
        np.where(x.numpy() <= 0, x.numpy() * (0.1 + 0.4 * u), x.numpy()),
    )
    weights = torch.rand(4, 5, dtype=torch.float64)
    waits = -np.log1p(-u.reshape(4, 5))
    close(draw(lambda: torch.multinomial(weights, 2)), np.argsort(-weights.numpy() / waits, 1)[:, :2])
    sums, many = np.cumsum(weights.numpy(), 1), stream.uniform(0, 40).reshape(4, 10)
    expected = [np.searchsorted(s, m * s[-1], side="right") for s, m in zip(sums, many, strict=True)]
    close(draw(lambda: torch.multinomial(weights, 10, replacement=True)), expected)


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial_has_the_weights_distribution(replacement: bool) -> None:
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3])
    found = draw(lambda: torch.multinomial(weights.expand(20_000, 4), 2, replacement=replacement))
    share = torch.bincount(found[:, 0], minlength=4) / len(found)
    torch.testing.assert_close(share, weights, rtol=0, atol=5 * (0.25 / 20_000) ** 0.5)
    assert replacement or (found[:, 0] != found[:, 1]).all()


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (lambda x: torch.poisson(x.exp()), "poisson"),
        (lambda x: torch.distributions.Beta(x.exp(), 1.0, validate_args=False).sample(), "autograd.Function"),
        (lambda x: torch.rand(x.shape, generator=torch.Generator().manual_seed(1)), "generator of its own"),
    ],
)
def test_what_has_no_stream_per_member_is_not_fused_and_the_reason_is_told(sample: Any, reason: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + sample(x).mean()

    fleet = mf.Fleet([Model(), Model()])
    fleet.compile("sgd", "mse", lr=0.1)
    data = np.ones((4, 5), dtype=np.float32), np.ones((4, 2), dtype=np.float32)
    with pytest.raises(mf.FleetError, match=reason):
        fleet.fit(data, batch_size=4, strategy="fused", progress=False)


def test_a_model_that_forks_torchs_generator_is_not_fused() -> None:
    """Alone, what is drawn after the fork is what was drawn within."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.random.fork_rng(devices=[]):
                x = x + torch.rand_like(x)
            return self.layer(x + torch.rand_like(x))

    fleet = mf.Fleet([Model(), Model()])
    fleet.compile("sgd", "mse", lr=0.1)
    data = np.ones((4, 5), dtype=np.float32), np.ones((4, 2), dtype=np.float32)
    with pytest.raises(mf.FleetError, match="puts back the state of torch's generator"):
        fleet.fit(data, batch_size=4, strategy="fused", progress=False)


def test_a_draw_into_a_tensor_that_is_used_elsewhere_is_not_fused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.empty(8)
            part = noise[:4]
            noise.normal_()
            return self.layer(x) + part.sum()

    fleet = mf.Fleet([Model(), Model()])
    fleet.compile("sgd", "mse", lr=0.1)
    data = np.ones((4, 5), dtype=np.float32), np.ones((4, 2), dtype=np.float32)
    with pytest.raises(mf.FleetError, match="randomness"):
        fleet.fit(data, batch_size=4, strategy="fused", progress=False)

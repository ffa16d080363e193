"""Parameters of unlike dtypes in one model, complex and empty ones, fused: each steps as in torch."""

import copy
from typing import Any

import pytest
import torch
from tests.helpers import fit
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.each import each

ROWS = 12
LR = [1e-3, 1e-2, 3e-2]
CASES: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("sgd", torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("adam", torch.optim.Adam, {"weight_decay": 0.1}),
    ("adamw", torch.optim.AdamW, {"amsgrad": True}),
    ("rmsprop", torch.optim.RMSprop, {"momentum": 0.9}),
    ("adagrad", torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("adadelta", torch.optim.Adadelta, {}),
    ("nadam", torch.optim.NAdam, {}),
    ("radam", torch.optim.RAdam, {}),
    ("adamax", torch.optim.Adamax, {}),
]
IDS = [name for name, *_ in CASES]


def tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Mixed(nn.Module):
    """A bfloat16 parameter first, then float32 and float64."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.narrow = nn.Parameter(tensor(64, 2, seed=seed, dtype=torch.bfloat16))
        self.usual = nn.Parameter(tensor(64, 2, seed=seed + 1, dtype=torch.float32))
        self.wide = nn.Parameter(tensor(64, 2, seed=seed + 2))

    def forward(self, x: Tensor) -> Tensor:
        # Every parameter gets a gradient of its own: what one rounds is not felt by the others.
        parts = [x @ self.narrow.double(), x @ self.usual.double(), x @ self.wide]
        return torch.cat(parts, 1)


class Complex(nn.Module):
    """Complex parameters, one of them a scalar; a real one, and one without any numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor(64, 2, seed=seed, dtype=torch.complex128))
        self.factor = nn.Parameter(tensor(seed=seed + 1, dtype=torch.complex128))
        self.bias = nn.Parameter(tensor(2, seed=seed + 2))
        self.empty = nn.Parameter(tensor(0, 2, seed=0))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight * self.factor).abs() + self.bias + self.empty.sum()


def trained(
    make: Any, name: str, given: dict[str, Any], clip: float | None, targets: int, **options: Any
) -> tuple[list[Any], Tensor, Tensor]:
    models = [make(10 * row) for row in range(3)]
    x, y = tensor(ROWS, 64, seed=1), tensor(ROWS, targets, seed=2)
    fleet = mf.Fleet(models)
    fleet.compile(name, "mse", lr=each(LR), clip_norm=clip, **given)
    fit(fleet, (x, y), epochs=2, batch_size=4, shuffle=False, strategy="fused", **options)
    return models, x, y


def alone(model: nn.Module, kind: Any, given: dict[str, Any], clip: float | None, x: Tensor, y: Tensor) -> None:
    update = kind(model.parameters(), foreach=False, **given)
    for _ in range(2):
        for few, target in zip(x.split(4), y.split(4), strict=True):
            update.zero_grad()
            nn.functional.mse_loss(model(few), target).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            update.step()


@pytest.fixture(autouse=True)
def double_by_default() -> Any:
    # NAdam's running product has the default dtype in torch, whatever the parameter's.
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "kind", "given"), CASES, ids=IDS)
def test_parameters_of_unlike_dtypes_step_as_in_torch(name: str, kind: Any, given: dict[str, Any]) -> None:
    models, x, y = trained(Mixed, name, given, None, 6)
    for row, model in enumerate(models):
        reference = Mixed(10 * row)
        start = copy.deepcopy(reference)
        alone(reference, kind, {"lr": LR[row], **given}, None, x, y)
        for (path, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert ours.dtype == theirs.dtype
            moved = (theirs - start.get_parameter(path)).abs().max().double()
            off = (ours - theirs).abs().max().double()
            # The bits agree wherever torch computes in vectors; a few units in the last place where it does not.
            most = {"narrow": 0.0, "usual": 1e-5, "wide": 1e-12}[path] * moved
            units = 4 * torch.finfo(torch.bfloat16).eps * theirs.abs().max() if path == "narrow" else 0
            assert off <= most + units, (path, float(off), float(moved))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(("name", "kind", "given"), CASES, ids=IDS)
def test_complex_and_empty_parameters_step_as_in_torch(
    name: str, kind: Any, given: dict[str, Any], clip: float | None
) -> None:
    models, x, y = trained(Complex, name, given, clip, 2)
    for row, model in enumerate(models):
        reference = Complex(10 * row)
        alone(reference, kind, {"lr": LR[row], **given}, clip, x, y)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_lion_steps_complex_parameters_as_pairs_of_numbers() -> None:
    models, x, y = trained(Complex, "lion", {"weight_decay": 0.1}, None, 2)
    single = Complex(0)
    fleet = mf.Fleet([single])
    fleet.compile("lion", "mse", lr=LR[0], weight_decay=0.1)
    fit(fleet, (x, y), epochs=2, batch_size=4, shuffle=False)
    reference = Complex(0)
    averages = [torch.zeros_like(p) for p in reference.parameters()]
    for few, target in [*zip(x.split(4), y.split(4), strict=True)] * 2:
        reference.zero_grad()
        nn.functional.mse_loss(reference(few), target).backward()
        with torch.no_grad():
            for p, average in zip(reference.parameters(), averages, strict=True):
                assert p.grad is not None
                gradient = p.grad
                direction = 0.9 * average + 0.1 * gradient
                if p.is_complex():
                    direction = torch.complex(direction.real.sign(), direction.imag.sign())
                else:
                    direction = direction.sign()
                p -= LR[0] * (direction + 0.1 * p)
                average.copy_(0.99 * average + 0.01 * gradient)
    for model in (models[0], single):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_the_norm_of_gradients_of_unlike_dtypes_is_clipped_as_in_torch() -> None:
    models, x, y = trained(Mixed, "sgd", {}, 0.5, 6)
    for row, model in enumerate(models):
        reference = Mixed(10 * row)
        alone(reference, torch.optim.SGD, {"lr": LR[row]}, 0.5, x, y)
        # The norm of a bfloat16 gradient is itself a bfloat16: all that is scaled by it is a little off.
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-2, atol=1e-4)


def test_a_scaled_loss_is_refused_for_float16_parameters() -> None:
    fleet = mf.Fleet({"half": nn.Linear(2, 2).half()})
    with pytest.raises(mf.InputError, match="member 'half': precision=\"fp16\" keeps parameters in float32"):
        fleet.compile("sgd", "mse", precision="fp16")


class Changing(nn.Module):
    """Has buffers that a step makes something else of: another dtype, another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.count: Tensor
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count = self.count + 0.5
            self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        return self.layer(x) * (1 + self.count)


@pytest.mark.parametrize("members", [1, 2])
def test_a_buffer_that_becomes_something_else_is_what_torch_leaves(members: int) -> None:
    x, y = tensor(ROWS, 4, seed=1), tensor(ROWS, 2, seed=2)
    torch.manual_seed(0)
    models = [Changing() for _ in range(members)]
    references = copy.deepcopy(models)
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "mse", lr=0.1)
    reasons = [str(lane.reason) for lane in fleet.plan((x, y), batch_size=4).lanes]
    if members > 1:
        assert all("a step makes its buffer 'count' float64 (), and it was int64 ()" in told for told in reasons)
    fit(fleet, (x, y), epochs=2, batch_size=4, shuffle=False)
    for model, reference in zip(models, references, strict=True):
        alone(reference, torch.optim.SGD, {"lr": 0.1}, None, x, y)
        assert model.count.dtype == torch.float64
        assert model.count == reference.count == 3
        torch.testing.assert_close(model.seen, reference.seen)
        torch.testing.assert_close(model.layer.weight, reference.layer.weight, rtol=1e-12, atol=1e-13)


class Odd(nn.Module):
    """A tied weight, a frozen parameter of integers, and expanded tensors that no one trains."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.whole = nn.Parameter(torch.arange(3), requires_grad=False)
        self.wide = nn.Parameter(torch.full((1,), 0.5).expand(64), requires_grad=False)
        self.register_buffer("mask", torch.ones(1).expand(64))
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) * self.wide * self.mask + self.whole.sum()


def test_tied_frozen_and_expanded_tensors_are_what_torch_leaves() -> None:
    models, x, y = trained(Odd, "adamw", {"weight_decay": 0.1}, None, 64)
    for row, model in enumerate(models):
        reference = Odd(10 * row)
        alone(reference, torch.optim.AdamW, {"lr": LR[row], "weight_decay": 0.1}, None, x, y)
        assert model.second.weight is model.first.weight
        expected = reference.state_dict()
        for name, ours in model.state_dict().items():
            torch.testing.assert_close(ours, expected[name], rtol=1e-10, atol=1e-12)

"""Members whose numbers are more than numbers: not fused, or fused and still as they are alone."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.frameworks.torch import numbers
from tests.frameworks.torch.test_numbers import Forward, mlp
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf


def reasons(make: numbers.Make, values: list[Any], **recipe: Any) -> str:
    """Train members that can't be fused, compare them with each alone, and return the reasons of the plan."""
    recipe = recipe or {"loss": "cross_entropy"}
    data = numbers.rows()
    fleet = numbers.compiled(numbers.build(make, values), **recipe)
    plan = fleet.plan(data, batch_size=8)
    assert len(plan.lanes) > 1
    numbers.compare(fleet, lambda name: numbers.compiled(numbers.build(make, values), name, **recipe), data)
    return "; ".join(lane.reason or "" for lane in plan.lanes)


BRANCHES: dict[str, tuple[Callable[[Tensor, Any], Tensor], str]] = {
    "a branch": (lambda x, a: x * 2 if a > 0.6 else x.tanh(), "it calls Tensor.tanh where others call Tensor.mul"),
    "a branch within a call": (lambda x, a: F.dropout(x, 0.5, a > 0.6), "training= of F.dropout is False"),
    "a shape": (
        lambda x, a: F.pad(x[:, : int(a * 8)], (0, 8 - int(a * 8))),
        "an integer that is 4, and 6",
    ),
    "an integer of an integer": (lambda x, a: x + ((x > 0).long() * int(a * 4)), "an integer that is 2, and 3"),
    "a new integer": (lambda x, a: x + torch.full((8,), int(a * 4)), "an integer that is 2, and 3"),
    "a large integer": (lambda x, a: x + (2**60 + int(a * 4)), "an integer that is"),
    "repeated": (lambda x, a: functools.reduce(lambda y, _: y.tanh(), range(int(a * 10)), x), "it calls"),
    "no gradient": (lambda x, a: _without_gradient(x, a > 0.6) + x, "_set_grad_enabled|gradients"),
    "no rule": (lambda x, a: x * torch.linspace(0.0, a, 8, dtype=x.dtype), "torch.linspace has no rule"),
    "no rule for this number": (lambda x, a: F.softplus(x, 1.0, a), "F.softplus has no rule|no rule for a number"),
    "a custom function": (lambda x, a: Reversed.apply(x, a), "Reversed has no rule"),
    "a hook": (lambda x, a: _hooked(x, a), "register_hook"),
    "the value of a tensor": (lambda x, a: x * float(torch.tensor(a)), "Tensor.__float__"),
    "a dtype": (
        lambda x, a: x + ((x > 0).long() * (a if a < 0.6 else 2)).to(x.dtype),
        "torch.int64",
    ),
}


def _without_gradient(x: Tensor, stopped: bool) -> Tensor:
    with torch.set_grad_enabled(torch.is_grad_enabled() and not stopped):
        return x * 3


def _hooked(x: Tensor, a: float) -> Tensor:
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda grad: grad * a)
    return y


class Reversed(torch.autograd.Function):
    """Multiplies gradients by a number that no function of its forward is called with."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


reverse = Reversed.apply


@pytest.mark.parametrize("name", BRANCHES)
def test_what_is_more_than_a_number_is_run_apart_with_the_reason(name: str) -> None:
    function, reason = BRANCHES[name]
    found = reasons(lambda number: Forward(number, function), [0.5, 0.75])
    assert any(words in found for words in reason.split("|")), found


def test_apply_kept_as_a_function_is_seen() -> None:
    assert "Reversed has no rule" in reasons(lambda a: Forward(a, lambda x, a: reverse(x, a)), [0.5, 0.75])


def test_a_custom_function_without_numbers_is_fused() -> None:
    numbers.check(lambda a: Forward(a, lambda x, a: reverse(x * a, 0.5)), [0.5, 0.75])


def multiply(x: Tensor, a: float) -> Tensor:
    return x * a


@pytest.mark.filterwarnings("ignore")
def test_what_a_script_computes_is_not_taken_for_the_same() -> None:
    scripted = torch.jit.script(multiply)

    def zero_then_script(x: Tensor, a: float) -> Tensor:
        # Zero whatever the number is, until the weights have changed.
        return x + scripted(x - x.detach(), a)

    make: numbers.Make = lambda a: Forward(a, zero_then_script)  # noqa: E731
    data = numbers.rows()
    fleet = numbers.compiled(numbers.build(make, [0.5, 4.0]), loss="cross_entropy")
    numbers.compare(
        fleet, lambda name: numbers.compiled(numbers.build(make, [0.5, 4.0]), name, loss="cross_entropy"), data
    )


class Gated(nn.Module):
    """Starts at zero, so that its first outputs do not depend on its number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        nn.init.zeros_(self.last.weight)
        self.gate = nn.Parameter(torch.zeros(()))
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden + self.gate * self.number * hidden.sin()) * self.number


class Settings:
    def __init__(self, rate: float) -> None:
        self.rate = rate


class Configured(nn.Module):
    """Has its number in an object, a property, a closure, a list and a keyword."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.config = SimpleNamespace(rate=rate, other=[rate, {"rate": rate}])
        self.settings = Settings(rate)
        self.scale = lambda x: x * rate
        self.drop = functools.partial(F.dropout, p=rate)

    @property
    def rate(self) -> float:
        return self.config.rate / 2

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x), self.rate, self.training)
        hidden = self.drop(hidden, training=self.training) + self.config.other[0] - self.config.other[1]["rate"]
        return self.last(self.scale(hidden) ** 2 + self.settings.rate)


@pytest.mark.parametrize("make", [Gated, Configured])
def test_numbers_are_found_wherever_a_model_keeps_them(make: Callable[[float], nn.Module]) -> None:
    numbers.check(make, [0.3, 0.6, 0.1])


def test_a_number_that_hides_a_mean_over_rows_does_not_hide_it_for_others() -> None:
    # With padding: the members have different numbers of rows.
    class Mixed(Forward):
        def __init__(self, number: float) -> None:
            super().__init__(number, lambda x, a: x + a * x.mean(0))

    x, y = numbers.rows()
    values = [0.0, 0.5, 0.7]
    data = {f"m{place}": (x[: 22 - 3 * place], y[: 22 - 3 * place]) for place in range(3)}

    def fleet(only: str | None = None) -> mf.Fleet:
        return numbers.compiled(numbers.build(Mixed, values), only, loss="cross_entropy")

    together = fleet()
    together.fit(mf.each(data), batch_size=8, epochs=2, progress=False)
    for name, own in data.items():
        alone = fleet(name)
        alone.fit(own, batch_size=8, epochs=2, progress=False)
        for key, tensor in together[name].state_dict().items():
            numbers.near(tensor, alone[name].state_dict()[key], 1e-10, f"{key} of {name}")


def test_integers_that_differ_keep_members_apart() -> None:
    models = numbers.build(lambda number: Forward(number, lambda x, n: x.roll(n, 1)), [2, 3])
    fleet = numbers.compiled(models, loss="cross_entropy")
    assert len(fleet.plan(numbers.rows(), batch_size=8).lanes) == 2


def test_unlike_losses_keep_members_apart() -> None:
    losses = mf.each([nn.CrossEntropyLoss(), nn.MultiMarginLoss(), nn.CrossEntropyLoss()])
    fleet = numbers.compiled(numbers.build(lambda _: mlp(), [0, 1, 2]), loss=losses)
    assert [lane.members for lane in fleet.plan(numbers.rows(), batch_size=8).lanes] == [("m0", "m2"), ("m1",)]

"""What a member's code or a verb in a callback does must not reach the training of a member that is not fused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.types import Strategy

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2


class Counts(nn.Module):
    """Counts its calls in a buffer, in a buffer that it replaces, and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("added", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.added += 1
        self.replaced = self.replaced + 1
        self.calls.append(len(x))
        return self.layer(x)


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
@pytest.mark.parametrize(("strategy", "members"), [("interleaved", 2), ("threads", 2), ("auto", 1)])
def test_verbs_in_a_callback_leave_a_model_that_is_trained_in_place_as_it_was(
    verb: str, strategy: Strategy, members: int
) -> None:
    class Looks(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            outputs = run.fleet.predict(X) if verb == "predict" else run.fleet.evaluate((X, Y))
            assert len(outputs) == members

    fleet = mf.Fleet([Counts() for _ in range(members)], devices="cpu")
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    fleet.fit((X, Y), epochs=3, batch_size=4, strategy=strategy, callbacks=[Looks()], progress=False)
    for name in fleet:
        model = fleet[name]
        assert (model.added, model.replaced, len(model.calls)) == (9, 9, 9)


class Runs(nn.Module):
    """Calls a function at the end of its forward."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        self.function()
        return output


@pytest.mark.parametrize(
    ("function", "mode"),
    [
        (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
        (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
        (lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")),
        (lambda: torch.use_deterministic_algorithms(True), torch.are_deterministic_algorithms_enabled),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    ],
    ids=["grad", "dtype", "autocast", "deterministic", "threads"],
)
def test_a_mode_that_a_member_sets_does_not_reach_the_others(
    function: Callable[[], object], mode: Callable[[], object]
) -> None:
    seen: list[object] = []
    other = Runs(lambda: seen.append(mode()))
    fleet = mf.Fleet([Runs(function), other], devices="cpu")
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    before = mode()
    try:
        history = fleet.fit((X, Y), epochs=2, batch_size=4, strategy="interleaved", progress=False)
        steps = list(seen)
        fleet.evaluate((X, Y))
        fleet.predict(X)
        assert mode() == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert "1" not in history.failed
    assert steps.count(before) >= 6, "one for every step"
    if mode is not torch.is_grad_enabled:  # evaluations have no gradients
        assert set(seen) == {before}

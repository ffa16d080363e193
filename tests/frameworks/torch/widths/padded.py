"""Networks of a width, trained in one lane with others and alone."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import modelfleet as mf

WIDTHS = [4, 12, 7, 12]
ROWS = 24


class Wide(nn.Module):
    """A network of a width that computes by a function."""

    def __init__(
        self, width: int, parts: Mapping[str, nn.Module], run: Callable[["Wide", Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.width = width
        for name, part in parts.items():
            self.add_module(name, part)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, 6)), random.integers(0, 3, ROWS)


def build(make: Callable[[int], nn.Module], widths: list[int], **recipe: Any) -> mf.Fleet:
    fleet = mf.Fleet.build(lambda width: make(int(width)), len(widths), seed=0, width=mf.each(widths))
    momentum = {"momentum": 0.9} if recipe.get("optimizer", "sgd") == "sgd" else {}
    recipe = {"optimizer": "sgd", "lr": 0.05, **momentum, "loss": "cross_entropy", **recipe}
    fleet.compile(recipe.pop("optimizer"), recipe.pop("loss"), metrics=["accuracy"], **recipe)
    return fleet


def only(fleet: mf.Fleet, name: str) -> mf.Fleet:
    for other in list(fleet.names):
        if other != name:
            fleet.drop(other)
    return fleet


def found_in(fleet: mf.Fleet, name: str, history: mf.History, x: np.ndarray) -> dict[str, np.ndarray]:
    weights = {f"weight {key}": value.detach().numpy().copy() for key, value in fleet[name].state_dict().items()}
    values = {f"history {key}": np.array(own) for key, own in history[name].items()}
    return {**weights, **values, "prediction": fleet.predict(x)[name]}


def assert_close(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    close = 1e-10 if torch.get_default_dtype() == torch.float64 else 1e-4
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=close, atol=close, err_msg=key)


def assert_as_alone(make: Callable[[int], nn.Module], widths: list[int] = WIDTHS, **recipe: Any) -> None:
    """Train members of some widths in one lane, and each alone, and compare everything."""
    x, y = data()
    fit: dict[str, Any] = {"validation": (x, y), "epochs": 2, "batch_size": 8, "progress": False}
    fleet = build(make, widths, **recipe)
    history = fleet.fit((x, y), strategy="fused", **fit)
    plan = fleet.plan((x, y), batch_size=8)
    assert len(plan.lanes) == 1
    assert plan.lanes[0].fused
    for name in fleet.names:
        alone = only(build(make, widths, **recipe), name)
        own = alone.fit((x, y), **fit)
        assert_close(found_in(fleet, name, history, x), found_in(alone, name, own, x))

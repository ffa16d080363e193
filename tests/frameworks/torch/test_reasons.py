"""The reason for not fusing names the line of the user's code."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelfleet.frameworks.torch.tracing.reasons import explain
from modelfleet.frameworks.user_code import is_user_file, line_of_error, line_of_frame

from . import comparing

NET = """
import random
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, look):
        super().__init__()
        self.layer, self.look = nn.Linear(4, 3), look

    def forward(self, x):
        return self.look(self.layer(x))

def branch(x):
    if x.sum() > 0:  # line 15
        return x
    return -x

def item(x):
    return x * x.mean().item()  # line 20

def shape(x):
    return x[x > 0].sum() + x  # line 23

def generator(x):
    return x + torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=x.dtype)  # line 26

def chance(x):
    return x * random.choice([1.0, 2.0])  # line 29

def seed(x):
    torch.manual_seed(0)  # line 32
    return x

def wrong(x):
    return x + torch.ones(7)  # line 36

def deep(x):
    return nn.Sequential(nn.Identity(), Net.Inner())(x)

class Inner(nn.Module):
    def forward(self, x):
        return x.tolist() and x  # line 43

Net.Inner = Inner
"""
LINES = {"branch": 15, "item": 20, "shape": 23, "generator": 26, "chance": 29, "seed": 32, "deep": 43}


@pytest.fixture
def net(tmp_path: Path) -> ModuleType:
    path = tmp_path / "net.py"
    path.write_text(NET)
    spec = importlib.util.spec_from_file_location("user_net", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", LINES)
def test_the_reason_names_the_line_that_is_in_the_way(net: ModuleType, name: str) -> None:
    fleet = comparing.compiled(comparing.build(lambda: net.Net(getattr(net, name)), 2), loss="cross_entropy")
    assert f"at net.py:{LINES[name]}" in str(comparing.reason(fleet, comparing.rows()))


def test_a_known_failure_is_explained_and_an_unknown_one_is_quoted() -> None:
    assert str(explain(RuntimeError("data-dependent control flow. More"))) == (
        "its forward branches on the value of a tensor (data-dependent control flow)"
    )
    assert str(explain(KeyError())) == "KeyError: KeyError"
    assert len(str(explain(ValueError("x" * 500)))) < 200
    assert explain(RuntimeError("vmap: would mutate a captured Tensor")).shared


def raised(function: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


def test_the_line_is_the_innermost_of_the_users() -> None:
    def inner(x: Tensor) -> Tensor:
        return nn.functional.linear(x, torch.ones(2, 3))

    first = inner.__code__.co_firstlineno
    assert line_of_error(raised(lambda: inner(torch.ones(1, 7)))) == f"test_reasons.py:{first + 1}"


def test_code_without_a_file_and_libraries_are_not_the_users() -> None:
    assert not is_user_file(random.__file__)
    assert not is_user_file(torch.__file__)
    assert not is_user_file("<frozen importlib._bootstrap>")
    assert is_user_file(__file__)
    error = raised(lambda: eval(compile("1 / 0", "<generated>", "eval")))
    assert str(line_of_error(error)).startswith("test_reasons.py:")
    assert line_of_error(ValueError()) is None
    assert line_of_frame(None, "eager.py") is None

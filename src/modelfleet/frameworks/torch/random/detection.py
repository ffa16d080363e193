"""Whether a model may draw random numbers at some step, told from its code without running it.

A plain member's draws are watched only where there may be some: to look at every operation costs as much as a
small model's forward. What can't be seen here may draw.
"""

import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

_NAMES = re.compile(
    r"drop|rand|bernoulli|normal(?!i)|uniform|multinomial|poisson|binomial|sample|exponential|cauchy|geometric|gumbel"
    r"|noise|rrelu|perm(?!ute)|shuffle|gamma_|dirichlet|seed|generator|distribution|fractional",
    re.IGNORECASE,
)
_DRAWING = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class DrawDetector:
    """Whether a model may draw at its next step."""

    def __init__(self, model: nn.Module, functions: Iterable[Callable[..., Any] | None]) -> None:
        self._resting: list[tuple[nn.Module, str]] = []  # modules that draw nothing while this rate of theirs is 0
        self._always = _may_draw(model, functions, self._resting)

    def may_draw(self) -> bool:
        """Return True unless no code names anything random, and the rate of every dropout is 0."""
        return self._always or any(getattr(module, rate) for module, rate in self._resting)


def _may_draw(
    model: nn.Module, functions: Iterable[Callable[..., Any] | None], resting: list[tuple[nn.Module, str]]
) -> bool:
    """Return True if the code of a model, its hooks, or the functions around it names anything random."""
    seen: set[types.CodeType] = set()
    waiting: list[Any] = [function for function in functions if function is not None]
    for module in model.modules():
        if _is_torchs(module):
            if isinstance(module, _DRAWING):
                return True
            resting += [(module, rate) for rate in ("p", "dropout") if _is_rate(getattr(module, rate, None))]
        else:
            waiting += _methods(type(module))
            waiting += [value for value in vars(module).values() if callable(value)]  # functions and the like
        hooks = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        waiting += [hook for table in hooks for hook in table.values()]
    while waiting:
        function = waiting.pop()
        if isinstance(function, nn.Module):
            if _may_draw(function, (), resting):
                return True
            continue
        found = _python_function(function)
        if found is None:
            return True
        if found.__code__ in seen or _is_torchs(found):
            continue
        for code in _codes(found.__code__):
            seen.add(code)
            if any(_NAMES.search(name) for name in (*code.co_names, *code.co_freevars)):
                return True
            waiting += _called(found, code)
    return False


def _is_rate(value: Any) -> bool:
    return value is not None and not isinstance(value, nn.Module)


def _is_torchs(value: Any) -> bool:
    """Return True for torch's own functions and classes, and for modules of its own classes."""
    module = type(value).__module__ if isinstance(value, nn.Module) else value.__module__
    return module is not None and module.partition(".")[0] == "torch" and "jit" not in module


def _python_function(value: Any) -> types.FunctionType | None:
    """Return the Python function behind a callable; None if its code can't be seen."""
    while not isinstance(value, types.FunctionType):
        names = ("func", "__func__", "__wrapped__")  # of a partial, a method, a decorated function
        inner = next((found for name in names if (found := getattr(value, name, None)) is not None), None)
        if inner is None and not isinstance(value, type):
            inner = next(
                (vars(base)["__call__"] for base in type(value).__mro__ if "__call__" in vars(base)), None
            )
        if inner is None or inner is value:
            return None
        value = inner
    return value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _called(function: types.FunctionType, code: types.CodeType) -> Iterator[Any]:
    """Return the Python functions that a code may call: global ones, and those it closes over."""
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType):
            yield value
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a variable that is not yet assigned
            continue
        if isinstance(value, types.FunctionType | types.MethodType | nn.Module):
            yield value


def _methods(cls: type) -> Iterator[Any]:
    """Return what a module's class may run in its forward: all but what only makes the module."""
    for base in cls.__mro__:
        if base is not object and not _is_torchs(base):
            for name, value in vars(base).items():
                if "init" in name or "reset" in name:
                    continue
                if isinstance(value, types.FunctionType | staticmethod | classmethod | property):
                    yield value.fget if isinstance(value, property) else getattr(value, "__func__", value)

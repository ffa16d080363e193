"""Find out from a model's code, without running it, whether it may draw random numbers.

For a member that runs alone, operations are watched for draws only if there may be some: watching costs as much as
a small model's forward. Code that can't be seen here counts as drawing.
"""

import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from modelfleet.frameworks.structure import cell_contents, nested_code
from modelfleet.frameworks.torch.cutting.stage import Stage, function_of
from modelfleet.frameworks.torch.structure import HOOKS

_RANDOM_NAMES = re.compile(
    r"drop|rand|bernoulli|normal(?!i)|uniform|multinomial|poisson|binomial|sample|exponential|cauchy|geometric|gumbel"
    r"|noise|rrelu|perm(?!ute)|shuffle|gamma_|dirichlet|seed|generator|distribution|fractional|scaled_dot_product",
    re.IGNORECASE,
)
_WITH_DROPOUT = re.compile(r"\b(lstm|gru|rnn_\w+)\b")  # operations of ATen that take a rate among their arguments
_RANDOM_MODULES = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class DrawDetector:
    """Finds out whether a model may draw at its next step."""

    def __init__(self, model: nn.Module, functions: Iterable[Callable[..., Any] | None]) -> None:
        self._rates: list[tuple[nn.Module, str]] = []  # modules that draw unless the attribute of this name is 0
        self._always = _may_draw(model, functions, self._rates)

    @property
    def always(self) -> bool:
        """Return True if it may draw in evaluation mode, too, when torch's own dropouts do not."""
        return self._always

    def may_draw(self) -> bool:
        """Return False if no code names anything random, and the rate of every dropout is 0."""
        return self._always or any(getattr(module, rate) for module, rate in self._rates)


def _may_draw(
    model: nn.Module, functions: Iterable[Callable[..., Any] | None], rates: list[tuple[nn.Module, str]]
) -> bool:
    """Return True if the code of a model, its hooks or the given functions names anything random.

    Adds the dropout modules of torch to `rates`.
    """
    seen: set[types.CodeType] = set()
    waiting: list[Any] = [function for function in functions if function is not None]
    for module in model.modules():
        if _is_from_torch(module):
            if isinstance(module, _RANDOM_MODULES):
                return True
            found = {name: getattr(module, name, None) for name in ("p", "dropout")}
            rates += [(module, n) for n, rate in found.items() if not isinstance(rate, nn.Module | None)]
        else:
            waiting += _methods(type(module))
            waiting += [value for value in vars(module).values() if callable(value)]
        if isinstance(module, Stage):  # its forward is not a method
            forward = function_of(module)
            if any(_WITH_DROPOUT.search(name) for name in forward.__code__.co_names):
                return True
            waiting.append(forward)
        waiting += [hook for table in HOOKS for hook in getattr(module, table).values()]
    while waiting:
        function = waiting.pop()
        if isinstance(function, nn.Module):
            if _may_draw(function, (), rates):
                return True
            continue
        found = _python_function(function)
        if found is None:
            return True
        if found.__code__ in seen or _is_from_torch(found):
            continue
        for code in nested_code(found.__code__):
            seen.add(code)
            if any(_RANDOM_NAMES.search(name) for name in (*code.co_names, *code.co_freevars)):
                return True
            waiting += _called(found, code)
    return False


def _is_from_torch(value: Any) -> bool:
    """Return True for functions and classes of torch, and for modules of its classes."""
    module = type(value).__module__ if isinstance(value, nn.Module) else value.__module__
    return module is not None and module.partition(".")[0] == "torch" and "jit" not in module


def _python_function(value: Any) -> types.FunctionType | None:
    """Return the Python function behind a callable; None if it has no Python code."""
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


def _called(function: types.FunctionType, code: types.CodeType) -> Iterator[Any]:
    """Yield the Python functions that some code may call: global ones, and those it closes over."""
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType):
            yield value
    for cell in function.__closure__ or ():
        value = cell_contents(cell)
        if isinstance(value, types.FunctionType | types.MethodType | nn.Module):
            yield value


def _methods(cls: type) -> Iterator[Any]:
    """Yield what a module's class may run in its forward: all methods but those that only set it up."""
    for base in cls.__mro__:
        if base is not object and not _is_from_torch(base):
            for name, value in vars(base).items():
                if "init" in name or "reset" in name:
                    continue
                if isinstance(value, types.FunctionType | staticmethod | classmethod | property):
                    yield value.fget if isinstance(value, property) else getattr(value, "__func__", value)

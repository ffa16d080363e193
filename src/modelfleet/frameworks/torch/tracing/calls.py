"""Calls of torch functions by a model's Python: their names, and their arguments by path."""

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.autograd_function import custom_function_call
from torch.overrides import TorchFunctionMode, resolve_name

from modelfleet.frameworks.structure import is_importable
from modelfleet.frameworks.torch.values import Freezer

Function = Callable[..., Any]
# Not told of: a fake tensor's device is an attribute of Python, so it would be read unseen while a step is traced.
_DEVICE = torch.Tensor.device.__get__  # pyrefly: ignore[missing-attribute]
Path = tuple[str | int, ...]
"""Where a value is among the arguments: the parameter's name or the position, then the indices within."""


class Arguments:
    """Arguments of one call, by parameter. For functions written in C, those without a name are by position.

    For functions written in Python, the default values are included. So it makes no difference how they are given.
    """

    def __init__(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.function = function
        self._bound: inspect.BoundArguments | None = None
        signature = _signature(function)
        if signature is not None:
            self._bound = signature.bind(*args, **kwargs)
            self._bound.apply_defaults()
            self.values: dict[str | int, Any] = {**self._bound.arguments}
        else:
            self.values = {**dict(enumerate(args)), **kwargs}

    def with_values(self, changed: Mapping[Path, Any]) -> "Arguments":
        """Return these arguments with other values at some paths."""
        other = object.__new__(Arguments)
        other.function, other._bound, other.values = self.function, self._bound, dict(self.values)
        for path, value in changed.items():
            other.values[path[0]] = _put(other.values[path[0]], path[1:], value)
        return other

    def at(self, path: Path) -> Any:
        """Return the value at a path."""
        return functools.reduce(lambda value, key: _parts(value)[key], path[1:], self.values[path[0]])

    def call(self, function: Function | None = None) -> Any:
        """Call the function, or another one that takes the same arguments."""
        args, kwargs = self.positional()
        return (function or self.function)(*args, **kwargs)

    def positional(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as the function is called: those by position, and those by name."""
        if self._bound is not None:
            bound = inspect.BoundArguments(self._bound.signature, self.values)  # pyrefly: ignore[bad-argument-type]
            return bound.args, bound.kwargs
        args = tuple(value for key, value in self.values.items() if isinstance(key, int))
        return args, {key: value for key, value in self.values.items() if isinstance(key, str)}

    def leaves(self) -> Iterator[tuple[Path, Any]]:
        """Yield everything within the arguments by path: containers as their `Container`, then their parts."""
        for key, value in self.values.items():
            yield from flatten(value, (key,))


class Container:
    """Kind of a list, tuple or dict, and its size or keys."""

    def __init__(self, kind: type, parts: int | tuple[Hashable, ...]) -> None:
        self.content = kind, parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Container) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)

    def __repr__(self) -> str:
        kind, parts = self.content
        return f"a {kind.__name__} of {parts if isinstance(parts, int) else ', '.join(map(str, parts))}"


def flatten(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield a value's parts by path, and the `Container` of a list, tuple, slice or dict before its parts."""
    if isinstance(value, tuple | list):  # torch.Size is a tuple
        yield path, Container(type(value), len(value))
        for index, part in enumerate(value):
            yield from flatten(part, (*path, index))
    elif isinstance(value, slice):
        yield path, Container(slice, 3)
        yield from flatten(_parts(value), path)
    elif isinstance(value, dict):
        yield path, Container(type(value), tuple(value))
        for key, part in value.items():
            yield from flatten(part, (*path, key))
    else:
        yield path, value


def _put(tree: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    if isinstance(tree, dict):
        return {**tree, path[0]: _put(tree[path[0]], path[1:], value)}
    parts = [_put(part, path[1:], value) if index == path[0] else part for index, part in enumerate(_parts(tree))]
    if isinstance(tree, slice):
        return slice(*parts)
    return parts if isinstance(tree, list) else tuple(parts)


def _parts(value: Any) -> Any:
    return (value.start, value.stop, value.step) if isinstance(value, slice) else value


def _signature(function: Function) -> inspect.Signature | None:
    """Return the parameters of a function that is written in Python."""
    if not isinstance(function, types.FunctionType):
        return None
    return _known_signature(function) if is_importable(function) else _read_signature(function)


def _read_signature(function: types.FunctionType) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # such as Tensor.__pow__, which only wraps a function written in C
        return None


_known_signature = functools.cache(_read_signature)


def key_of(function: Function) -> Hashable:
    """Return a value that is equal for functions that do the same."""
    if isinstance(function, CustomFunction):
        return CustomFunction, Freezer(dict).freeze_class(function.kind)
    if isinstance(function, types.FunctionType) and not is_importable(function):
        return Freezer(dict).freeze(function)
    return function


def name_of(function: Function) -> str:
    """Return a function's name as users write it: `F.dropout`, `Tensor.mul`, `torch.full`."""
    if isinstance(function, CustomFunction):
        return function.kind.__name__
    name = resolve_name(function) or getattr(function, "__qualname__", None) or type(function).__name__
    name = name.removeprefix("torch.nn.").removeprefix("torch.").removesuffix(".__get__")
    if name.startswith("functional."):
        return f"F.{name.removeprefix('functional.')}"
    return name if "." in name else f"torch.{name}"


class CustomFunction:
    """`apply` of a subclass of `torch.autograd.Function`. No mode sees what its backward does."""

    def __init__(self, kind: type[torch.autograd.Function], apply: Function) -> None:
        self.kind = kind
        self._apply = apply

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it."""
        return self._apply(self.kind, *args, **kwargs)


class CallMode(TorchFunctionMode):
    """Context that is told of every torch function that Python calls, as `seen(function, args, kwargs)`.

    It must be the innermost mode: then it sees what the model's Python calls, and not what torch makes of that.
    Custom functions of autograd are seen, too, and not what their forward calls.
    """

    def seen(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call."""
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _DEVICE:
            return func(*args, **(kwargs or {}))
        if func is custom_function_call:  # what torch calls for a custom function below vmap
            return self.seen(CustomFunction(args[0], func), args[1:], kwargs or {})
        return self.seen(func, args, kwargs or {})


@contextmanager
def custom_functions_seen() -> Iterator[None]:
    """Tell a `CallMode` of custom functions of autograd, too. Only one thread may be in this context at a time."""
    # A model may keep `apply` as a bound method. So the class that it calls is changed, not `apply` itself.
    owner: Any = torch.autograd.function._SingleLevelFunction

    def run(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return super(owner, cls).apply(*args, **kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        modes: Any = torch.overrides
        if not isinstance(modes._get_current_function_mode(), CallMode):
            return run(cls, *args, **kwargs)
        with modes._pop_mode_temporarily() as mode:
            return mode.seen(CustomFunction(cls, run), args, kwargs)

    owner.apply = classmethod(apply)
    try:
        yield
    finally:
        del owner.apply

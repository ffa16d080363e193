"""Rules for torch functions that take one number per member where they take one number.

Within `vmap`, the numbers of all members are a tensor without axes. Arithmetic takes such a tensor as it is. Other
functions take only Python floats, so they are written here in terms of functions that do. A function without a
rule is not fused across members whose numbers differ.
"""

import ast
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.tracing import number_dropout, number_functions, number_losses
from modelfleet.frameworks.torch.tracing.calls import Arguments, Function, Path
from modelfleet.frameworks.torch.tracing.recording import (
    RESULT,
    Call,
    Comparison,
    Described,
    Difference,
    Recording,
)
from modelfleet.frameworks.torch.tracing.replaying import Change

HALF_DTYPES = (torch.float16, torch.bfloat16)
LARGEST_EXACT = 2**53  # of the integers that a float64 has
PROGRAM = "program "  # begins the names of numbers that only tell programs apart


def site_name(call: int, path: Path) -> str:
    """Return the name of a place that takes a number: a call, and the path in its arguments."""
    return repr((call, path))


def program_name(recording: Recording, sites: Collection[str], known: dict[Hashable, int]) -> str:
    """Return a name that is equal for recordings that differ only in the numbers at these sites.

    Args:
        recording: The recording.
        sites: The names of the sites.
        known: The recordings that have a name already. It is filled in.
    """
    calls = tuple(
        (call.key, tuple(_without_sites(number, call, sites)), call.results, call.context)
        for number, call in enumerate(recording.calls)
    )
    return f"{PROGRAM}{known.setdefault((calls, tuple(sites)), len(known))}"


def _without_sites(number: int, call: Call, sites: Collection[str]) -> Iterator[Hashable]:
    for path, leaf in call.arguments:
        if site_name(number, path) not in sites:
            yield path, repr(leaf) if isinstance(leaf, float) else (type(leaf), leaf)


def changes(expected: Recording, numbers: Mapping[str, Tensor]) -> dict[int, Change]:
    """Return what to do in place of the calls that take the members' own numbers, for `Replay`.

    Args:
        expected: The recording of the member whose Python runs.
        numbers: By the name of a site, the number of each member, or the tensor of each: without the member axis
            that vmap hides.
    """
    by_call: dict[int, dict[Path, Tensor]] = {}
    for name, number in numbers.items():
        if name.startswith(PROGRAM):
            continue
        call, path = ast.literal_eval(name)
        by_call.setdefault(call, {})[path] = number
    return {call: _change(expected.calls[call], own) for call, own in by_call.items()}


def refuse_unknown(recording: Recording, found: Comparison, *, sizes: bool = False) -> None:
    """Raise `CannotFuseError` if members differ in more than numbers, or a function has no rule for a number.

    With `sizes`, they may also differ in shapes and integers.
    """
    if found.other is not None:
        raise CannotFuseError(found.other)
    for difference in () if sizes else (*found.integers, *found.shapes):
        name = recording.calls[difference.call].name
        one, other = list(dict.fromkeys(difference.values))[:2]
        what = "a shape" if isinstance(one, tuple) else "an integer"
        raise CannotFuseError(f"{name} is called with {what} that is {one}, and {other} for others")
    for difference in found.floats:
        call = recording.calls[difference.call]
        if not _has_rule(call, difference.path):
            raise CannotFuseError(
                f"{call.name} has no rule for a number per member ({_parameter(difference.path)} is "
                f"{difference.values[0]}, and {next(v for v in difference.values if v != difference.values[0])} "
                f"for others)"
            )


def with_integers_as_floats(recording: Recording, found: Comparison) -> Comparison:
    """Return a comparison in which integers count as floats where torch computes the same with both.

    That is: a function with a rule for the number takes it, and what it returns has a floating dtype anyway.
    """
    floats, integers = list(found.floats), []
    for difference in found.integers:
        kept = floats if _is_like_a_float(recording, difference) else integers
        kept.append(difference)
    return replace(found, floats=floats, integers=integers)


def _is_like_a_float(recording: Recording, difference: Difference) -> bool:
    call = recording.calls[difference.call]
    if difference.path[:1] == (RESULT,) or max(map(abs, difference.values)) > LARGEST_EXACT:
        return False
    given, results = (
        {leaf.dtype for _, leaf in leaves if isinstance(leaf, Described)} - {torch.bool}
        for leaves in (call.arguments, call.results)
    )
    floating = all(dtype.is_floating_point for dtype in results or given)
    return bool(results or given) and floating and _has_rule(call, difference.path)


def _has_rule(call: Call, path: Path) -> bool:
    """Return True if a call may take one number per member at a path."""
    rule = None if isinstance(call.function, str) else rule_of(call.function)
    return rule is not None and (rule.numbers is None or _parameter(path) in rule.numbers)


def _parameter(path: Path) -> str | int:
    return path[0]


class Rule:
    """Way to compute a function with numbers per member.

    Args:
        compute: Takes the arguments of the function, of which some are tensors now, and returns its result.
        numbers: The parameters that may be tensors, by name or position; None for all.
        casts: True to give `compute` numbers in the dtype of the tensors beside them, False to give float64.
        exact: True to give `compute` halves as they are, False to give them as float32.
        writes: The function writes its result to its first argument.
    """

    def __init__(
        self,
        compute: Function,
        numbers: tuple[str | int, ...] | None = None,
        *,
        casts: bool = False,
        exact: bool = False,
        writes: bool = False,
    ) -> None:
        self.compute = compute
        self.numbers = numbers
        self.casts = casts
        self.exact = exact
        self.writes = writes


def _change(call: Call, sites: Mapping[Path, Tensor]) -> Change:
    leaves = dict(call.arguments)
    floats = {path for path in sites if not isinstance(leaves[path], Described)}

    def change(arguments: Arguments, call: Call) -> Any:
        if not floats:
            return arguments.with_values(sites).call()
        rule = rule_of(arguments.function)
        assert rule is not None
        return _computed(rule, arguments, sites, floats, call)

    return change


def _computed(
    rule: Rule, arguments: Arguments, sites: Mapping[Path, Tensor], floats: set[Path], call: Call
) -> Any:
    """Compute a call by its rule. Halves are computed in float32, as torch's own kernels do."""
    given = [(path, leaf) for path, leaf in arguments.leaves() if isinstance(leaf, Tensor) and path not in sites]
    given += [(path, number) for path, number in sites.items() if path not in floats]
    changed: dict[Path, Any] = dict(sites)
    if not rule.exact:
        changed |= {path: leaf.float() for path, leaf in given if leaf.dtype in HALF_DTYPES}
    if rule.casts:
        dtype = _dtype([changed.get(path, leaf) for path, leaf in given])
        changed |= {path: sites[path].to(dtype) for path in floats}
    first = next(iter(arguments.values.values()))
    writes = rule.writes or arguments.values.get("inplace") is True
    if writes:  # the gradient of the rule may need what it has read
        path = next(path for path, leaf in given if leaf is first)
        changed[path] = changed.get(path, first).clone()
    result = arguments.with_values(changed).call(rule.compute)
    wanted = {path: leaf.dtype for path, leaf in call.results if isinstance(leaf, Described)}
    if isinstance(result, Tensor):
        result = result.to(wanted[()])
    elif isinstance(result, tuple):
        result = tuple(
            part.to(wanted[place,]) if isinstance(part, Tensor) else part for place, part in enumerate(result)
        )
    return first.copy_(result) if writes else result


def _dtype(tensors: list[Tensor]) -> torch.dtype:
    """Return the floating dtype that tensors have together; the default one if none is floating."""
    found: torch.dtype | None = None
    for dtype in (tensor.dtype for tensor in tensors):
        if dtype.is_complex:
            dtype = dtype.to_real()
        if dtype.is_floating_point:
            found = dtype if found is None else torch.promote_types(found, dtype)
    return found or torch.get_default_dtype()


def rule_of(function: Function) -> Rule | None:
    """Return the rule of a function, or None."""
    try:
        return RULES.get(function)
    except TypeError:  # not hashable
        return None


def _methods(
    names: str, compute: Callable[[Function], Function] = lambda function: function, **options: Any
) -> dict:
    """Return rules for functions of these names in `torch` and `Tensor`, and for those that write in place."""
    found: dict[Function, Rule] = {}
    for name in names.split():
        for library in (torch, Tensor):
            function = getattr(library, name, None)
            if function is None:
                continue
            found[function] = Rule(compute(function), casts=True, **options)
            written = getattr(library, f"{name}_", None)
            if written is not None:
                found[written] = Rule(compute(function), casts=True, writes=True, **options)
    return found


def _with_alpha(function: Function) -> Function:
    def run(x: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
        return function(x, other * alpha if isinstance(alpha, Tensor) else alpha * other)

    return run


def _clamp(function: Function) -> Function:
    def run(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
        bounds = (b if b is None else torch.as_tensor(b, dtype=x.dtype, device=x.device) for b in (min, max))
        return torch.clamp(x, *bounds)

    return run


def _addcmul(x: Tensor, first: Tensor, second: Tensor, *, value: Any = 1) -> Tensor:
    return x + value * first * second


def _addcdiv(x: Tensor, first: Tensor, second: Tensor, *, value: Any = 1) -> Tensor:
    return x + value * (first / second)


RULES: dict[Function, Rule] = {
    **_methods("mul multiply div divide true_divide floor_divide remainder fmod pow float_power rsub"),
    **_methods("atan2 arctan2 xlogy copysign lerp hypot where fill"),
    **_methods("masked_fill", lambda _: lambda x, mask, value: torch.where(mask, value, x)),
    **_methods("add sub subtract", _with_alpha),
    **_methods("gt ge lt le eq ne greater greater_equal less less_equal not_equal", exact=True),
    **_methods("clamp clip", _clamp),
    **_methods("clamp_min", lambda _: lambda x, min: torch.maximum(x, min)),
    **_methods("clamp_max", lambda _: lambda x, max: torch.minimum(x, max)),
    **_methods("addcmul", lambda _: _addcmul),
    **_methods("addcdiv", lambda _: _addcdiv),
    Tensor.__rsub__: Rule(lambda self, other: other - self, casts=True),
    Tensor.__rdiv__: Rule(lambda self, other: other / self, casts=True),
    Tensor.__rtruediv__: Rule(lambda self, other: other / self, casts=True),
    Tensor.__pow__: Rule(lambda self, other: torch.pow(self, other), casts=True),
    Tensor.__rpow__: Rule(lambda self, other: torch.pow(other, self), casts=True),
    Tensor.__floordiv__: Rule(lambda self, other: torch.floor_divide(self, other), casts=True),
    Tensor.__rfloordiv__: Rule(lambda self, other: torch.floor_divide(other, self), casts=True),
    Tensor.__rmod__: Rule(lambda self, other: torch.remainder(other, self), casts=True),
    **{
        function: Rule(compute, numbers, exact=function in number_dropout.IN_OWN_DTYPE)
        for function, (compute, numbers) in number_dropout.RULES.items()
    },
    **{function: Rule(compute, numbers) for function, (compute, numbers) in number_functions.RULES.items()},
    **{function: Rule(compute, numbers) for function, (compute, numbers) in number_losses.RULES.items()},
    **{
        function: Rule(compute, numbers, writes=True)
        for function, (compute, numbers) in number_functions.WRITING_RULES.items()
    },
}

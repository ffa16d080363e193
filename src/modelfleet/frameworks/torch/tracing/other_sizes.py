"""Programs of a step for one more size of its batches, from those of other sizes.

To trace a step takes a tenth of a second, and batches may have many sizes, such as sequence lengths. Traced
graphs of one step, on batches that differ in one size, mostly have the same operations, with numbers that grow
evenly with the size: on a line, or, where each time step meets each, on a parabola. Three graphs show that all
numbers are on lines, four that they are on parabolas. Then the next graph follows from these.

What the Python does at a size shows only when it runs. So it is run once more, for one member and without a
backward pass, and its calls must follow from those at the other sizes, too.
"""

from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from operator import is_
from typing import Any

from torch import Tensor, fx

from modelfleet.frameworks.torch.tracing.calls import CustomFunction
from modelfleet.frameworks.torch.tracing.recording import Recording, compare, same_contents
from modelfleet.frameworks.torch.tracing.trace import Program, Step, program_of
from modelfleet.types import Tree

LEAST, MOST = 3, 4
"""How many sizes are traced: for numbers on lines, and for those on parabolas."""
Sizes = tuple[int, ...]
Forms = tuple[tuple[int, ...], ...]


class OtherGraphError(Exception):
    """Raised if a program does not follow from those of other sizes."""


def differing_sizes(forms: Sequence[Forms]) -> Sizes | None:
    """Return the only size in which forms of a batch differ, of each; None if they differ in more, or are tiny."""
    found = {
        sizes for shapes in zip(*forms, strict=True) for sizes in zip(*shapes, strict=True) if len(set(sizes)) > 1
    }
    sizes = found.pop() if len(found) == 1 else ()
    return sizes if sizes and len(set(sizes)) == len(sizes) and min(sizes) > 1 else None


def refuse_other_calls(recordings: Sequence[Recording], sizes: Sizes) -> None:
    """Raise `OtherGraphError` if what the Python calls does not grow evenly with the size.

    Args:
        recordings: The calls at each size.
        sizes: The sizes, the new one last.
    """
    first, found = recordings[0], compare(recordings)
    if found.other is not None or found.floats or found.outside:
        raise OtherGraphError("it calls something else")
    if any(
        len(own.outside) != len(first.outside) or not all(map(is_, own.outside, first.outside))
        for own in recordings
    ):
        raise OtherGraphError("it reads other tensors")
    for call in first.calls:
        if isinstance(call.function, CustomFunction) or "hook" in call.name:
            raise OtherGraphError(f"what {call.name} does in a backward pass is unknown")
    for _, _, values in found.integers:
        predicted(values[:-1], sizes, values[-1])
    for _, _, shapes in found.shapes:
        for values in zip(*shapes, strict=True):
            if len(set(values)) > 1:
                predicted(values[:-1], sizes, values[-1])


def predicted(values: Sequence[int], sizes: Sizes, expected: int | None = None) -> int:
    """Return a number at the last of some sizes, from its values at the others.

    Raises:
        OtherGraphError: The numbers do not grow evenly, or one is so small that torch may treat it in its own way.
    """
    known = list(zip(sizes, values, strict=False))
    for count in (2, 3):  # numbers that determine a line and a parabola; one more shows that they are on it
        if len(known) > count and all(_through(known[:count], at) == value for at, value in known[count:]):
            found = _through(known[:count], sizes[-1])
            small = len(set(values)) > 1 and min(*values, found) < 2
            if found.denominator == 1 and not small and expected in (None, found):
                return int(found)
            break
    raise OtherGraphError(f"{list(values)} at {list(sizes[:-1])}, {expected} at {sizes[-1]}")


def _through(points: Sequence[tuple[int, int]], at: int) -> Fraction:
    """Return the value of the polynomial through some points (Lagrange's form)."""
    total = Fraction(0)
    for x, value in points:
        term = Fraction(value)
        for other, _ in points:
            if other != x:
                term *= Fraction(at - other, x - other)
        total += term
    return total


def program_from(
    others: Sequence[Program],
    sizes: Sizes,
    step: Step,
    args: tuple[Tree, ...],
    stacked: Sequence[bool],
    steady: Sequence[int],
) -> Program:
    """Return the program of `step(*args)`, as `trace` does.

    Args:
        others: Programs of this step at other sizes.
        sizes: Their sizes, and that of the arguments.
        step: The step.
        args: The arguments.
        stacked: For each argument, True if its tensors have a member axis.
        steady: The indices of the inputs that are the same tensors at most steps.

    Raises:
        OtherGraphError: The programs differ in more than numbers that grow evenly with the size.
    """
    first = others[0]
    if any(not all(map(is_, own.outside, first.outside)) or own.unused != first.unused for own in others):
        raise OtherGraphError("the programs read other tensors")
    modules = [program.graph for program in others if program.graph is not None]
    graph = _graph_from(modules, sizes)
    program = program_of(step, args, stacked, graph, first, steady)
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(inputs, program.inputs, strict=True):
        val = node.meta["val"]
        if (tuple(val.shape), val.stride(), val.dtype) != (spec.shape, spec.stride, spec.dtype):
            raise OtherGraphError(f"{node.name} is laid out in another way")
    return program


def _graph_from(modules: Sequence[fx.GraphModule], sizes: Sizes) -> fx.GraphModule:
    """Return the graph at the last size."""
    found = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    columns = [list(module.graph.nodes) for module in modules]
    if len(modules) < LEAST or len({len(nodes) for nodes in columns}) > 1:
        raise OtherGraphError("the graphs have other operations")

    def at_size(own: Sequence[Any]) -> Any:
        first = own[0]
        if isinstance(first, fx.Node):
            if any(values.get(one) is not values[first] for one in own):
                raise OtherGraphError("the graphs are connected in another way")
            return values[first]
        if isinstance(first, list | tuple):
            return type(first)(at_size(parts) for parts in _zipped(own))
        if isinstance(first, Mapping):
            return {key: at_size([one[key] for one in own]) for key in first}
        return _value(own, sizes)

    for nodes in zip(*columns, strict=True):
        node = nodes[0]
        if len({(one.op, _target(one)) for one in nodes}) > 1:
            raise OtherGraphError("the graphs have other operations")
        if node.op == "get_attr":
            constants = [getattr(module, str(one.target)) for module, one in zip(modules, nodes, strict=True)]
            if any(one.shape != constants[0].shape or not same_contents(constants[0], one) for one in constants):
                raise OtherGraphError("the graphs have other constants")
        args, kwargs = at_size([one.args for one in nodes]), at_size([one.kwargs for one in nodes])
        made = found.create_node(node.op, node.target, args, kwargs, node.name)
        if node.op != "output":
            made.meta = {**node.meta, "val": _example([one.meta.get("val") for one in nodes], sizes)}
        for one in nodes:
            values[one] = made
    return fx.GraphModule(modules[0], found)


def _target(node: fx.Node) -> Hashable:
    return "" if node.op in ("get_attr", "placeholder", "output") else node.target


def _zipped(own: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    if len({len(parts) for parts in own}) > 1:
        raise OtherGraphError("lists of other lengths")
    return list(zip(*own, strict=True))


def _value(own: Sequence[Any], sizes: Sizes) -> Any:
    first = own[0]
    if all(type(one) is type(first) and (one == first or (one != one and first != first)) for one in own):
        return first
    if not all(type(one) is int for one in own):
        raise OtherGraphError(f"{own}")
    return predicted(own, sizes)


def _example(own: Sequence[Any], sizes: Sizes) -> Any:
    """Return an example of a result: a fake tensor."""
    first = own[0]
    if isinstance(first, list | tuple):
        return type(first)(_example(parts, sizes) for parts in _zipped(own))
    if not isinstance(first, Tensor):
        return _value(own, sizes)
    shape, stride = (
        [_value(parts, sizes) for parts in _zipped(parts)]
        for parts in ([one.shape for one in own], [one.stride() for one in own])
    )
    if any(one.dtype != first.dtype for one in own):
        raise OtherGraphError("results of other dtypes")
    if shape == list(first.shape) and stride == list(first.stride()):
        return first
    return first.new_empty_strided(shape, stride)

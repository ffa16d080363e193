"""Arguments of a lane's programs: which program they need, and the same arguments for other members."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from modelfleet.trees import leaves, map_tree, paths, structure
from modelfleet.types import State, Tree

Key = tuple[Hashable, ...]
Shapes = tuple[tuple[int, ...], ...]
Args = tuple[Tree, ...]
"""Arguments of a step: the state, the shared tensors, and the rest."""
# A whole step, its parts, the parts on packed tensors, and those of a step whose rows are on several devices:
TRAINING = ("train", "gradients", "apply", "packed_gradients", "packed_apply", "row_gradients", "row_apply")
APPLYING = ("apply", "packed_apply", "row_apply")


def family_of(kind: str, args: Args, shared_data: bool) -> Key:
    """Return what tells programs for different arguments apart, besides the width."""
    # The weights and the numbers per member are left out. They follow from the structure and the width.
    data = _key(args[-2:] if kind == "train" else args[2:], 0 if shared_data else 1)
    # The shared tensors, the optimizers' slices and which parameters have the same counts do not follow from it.
    counted = tuple((own, *numbers) for own, numbers in args[2].items()) if kind in ("train", *APPLYING) else ()
    # Members that differ in numbers have a column for each place that takes one.
    numbers = tuple(args[0]["numbers"]) if "numbers" in args[0] else None
    form = "packed" in args[0], _row_stride(args[0])
    return kind, shared_data, tuple(args[1]), counted, numbers, form, data


def without_sizes(family: Key) -> tuple[Key, Shapes]:
    """Return a program's key without the sizes of its batch, and the shapes of the batch's tensors."""
    *rest, last = family
    data: Any = last  # from `_key`
    kinds = [(structure, *((len(shape), dtype) for shape, dtype, _ in tensors)) for structure, *tensors in data]
    return (*rest, tuple(kinds)), tuple(shape for _, *tensors in data for shape, *_ in tensors)


def numbers_key(kind: str, data: Tree, weights: Tensor | None, *, shared: bool) -> Key:
    """Return what the numbers that a step computes with may depend on: the kind, and the form of the batch."""
    first = 0 if shared else 1
    form = tuple((leaf.shape[first:], leaf.dtype) for leaf in leaves(data))
    return kind, structure(data), form, weights is not None


def width_of(args: Args) -> int:
    """Return the number of members that the arguments are for."""
    return len(args[0]["member"]["seed"])


def steady_inputs(args: Args) -> list[int]:
    """Return the indices of the tensors that are the same ones at most steps: the members' numbers and seeds."""
    steady = ("[0].numbers.", "[0].member.seed")
    return [index for index, (path, _) in enumerate(paths(args)) if path.startswith(steady)]


def rows_of(args: Args, stacked: Sequence[bool], width: int) -> Iterator[Tree]:
    """Yield the arguments of a step for `width` members, by repeating the members there are."""
    seeds = args[0]["member"]["seed"]
    rows = torch.arange(width, device=seeds.device) % len(seeds)
    for arg, axis in zip(args, stacked, strict=True):
        yield map_tree(lambda t: t.index_select(0, rows), arg) if axis else arg


def readable(state: State) -> State:
    """Return the part of a state that a forward pass reads."""
    member = {name: state["member"][name] for name in ("seed", "step")}
    return {
        "params": state["params"],
        "frozen": state["frozen"],
        "buffers": state["buffers"],
        "member": member,
        **({"numbers": state["numbers"]} if "numbers" in state else {}),
    }


def _row_stride(state: State) -> int | None:
    """Return the distance between two members' parameters: packed ones are further apart than copies."""
    first = next(iter(state.get("params", {}).values()), None)
    return None if first is None or len(first) < 2 else first.stride(0)


def _key(args: Args, first: int) -> Key:
    # Without the member axis, if there is one: the width is kept apart. With the structure: the weights of padding
    # and sample weights are an array of floats beside (x, y), both of them.
    return tuple(
        (structure(arg), *((leaf.shape[first:], leaf.dtype, leaf.stride()[first:]) for leaf in leaves(arg)))
        for arg in args
    )

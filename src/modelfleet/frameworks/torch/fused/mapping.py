"""Functions of one member, mapped over all members of a lane.

`fused=True` maps a function over the member axis with `torch.func.vmap`. `fused=False` calls it for a lane of one
member, without the member axis, for models that can't be mapped.
"""

from collections.abc import Callable, Sequence

import torch
from torch.func import grad, vmap

from modelfleet.trees import map_tree
from modelfleet.types import Tree

Axes = Sequence[int | None]
"""For each argument, 0 if its tensors have a member axis, or None if all members share them."""


def mapped(function: Callable[..., Tree], args: Sequence[Tree], axes: Axes, *, fused: bool) -> Tree:
    """Return the results `(member, …)` of one member's function for all members."""
    if fused:
        return _vmapped(function, args, axes)
    result = function(*(_first_member(arg, axis) for arg, axis in zip(args, axes, strict=True)))
    return map_tree(lambda t: t.unsqueeze(0), result)


def mapped_gradients(loss_of: Callable[..., Tree], args: Sequence[Tree], axes: Axes, *, fused: bool) -> Tree:
    """Return every member's gradients by its first argument, and what `loss_of` returns with its loss.

    A parameter that takes no part in the loss has a gradient of zero if fused, and none otherwise.
    """
    if fused:
        return _vmapped(grad(loss_of, has_aux=True), args, axes)
    params, *rest = (_first_member(arg, axis) for arg, axis in zip(args, axes, strict=True))
    with torch.enable_grad():
        params = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss, more = loss_of(params, *rest)
        found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(params, found, strict=True) if g is not None}
    return map_tree(lambda t: t.detach().unsqueeze(0), (gradients, more))


def _vmapped(function: Callable[..., Tree], args: Sequence[Tree], axes: Axes) -> Tree:
    # vmap wants the axis None for an argument that is None, and an empty dict has no axis at all.
    axes = tuple(None if arg is None or arg == {} else axis for arg, axis in zip(args, axes, strict=True))
    return vmap(function, in_dims=axes, randomness="different")(*args)


def _first_member(arg: Tree, axis: int | None) -> Tree:
    return arg if arg is None or axis is None else map_tree(lambda t: t[0], arg)

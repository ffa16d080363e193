"""Trials of a node before the training: what it makes of a few rows, what it draws, and how long it takes."""

import time
from collections.abc import Collection

import torch
from torch import Tensor, nn

from modelfleet.errors import InputError
from modelfleet.frameworks.node_engine import NodeTrial
from modelfleet.frameworks.torch.base import explained
from modelfleet.frameworks.torch.global_modes import KeepingModes
from modelfleet.frameworks.torch.modes import in_mode, training_modes
from modelfleet.frameworks.torch.parallel.row_independence import close, row_axes
from modelfleet.frameworks.torch.plain.contexts import PlainContexts
from modelfleet.frameworks.torch.plain.member import PlainMember
from modelfleet.frameworks.torch.plain.trials import scratch_copy
from modelfleet.frameworks.torch.python_state.undo import undoing_side_effects
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import DrawShapes
from modelfleet.frameworks.torch.random.trial_streams import ConstantStreams
from modelfleet.frameworks.torch.task import call
from modelfleet.trees import leaves, map_tree, rebuild
from modelfleet.types import Tree

MAX_ROWS = 16  # whose draws are looked at
TIMES = 2  # that a node is timed


def try_node(
    member: PlainMember, contexts: PlainContexts, inputs: Tree, wanted: Collection[int], *, train: bool
) -> NodeTrial:
    """Return what a node does with some rows. The node and torch's generators stay as they are.

    Args:
        member: The node's member.
        contexts: Its contexts.
        inputs: What the model is called with.
        wanted: Numbers of the leaves of `inputs` that take a gradient.
        train: True to try it in training mode, with a backward pass.

    Raises:
        InputError: The model can't take the inputs, or can't be copied.
    """
    model = scratch_copy(member.model)
    if model is None:
        raise InputError(
            f"stage {member.name!r} can't be copied, so it can't be tried before the training. Remove what "
            f"copy.deepcopy can't copy from its attributes."
        )
    with (
        explained(member.name, member.model, inputs),
        KeepingModes(member.device.type),
        undoing_side_effects(("self", model)),
        torch.random.fork_rng(devices=[]),
        in_mode(model, train=train, given=training_modes(member.model)),
        contexts.autocast(),
    ):
        draws: DrawShapes | str = ()
        mixes = False
        if train:
            draws, mixes = _look_at_rows(member, model, inputs)
        forward, backward, kept, outputs = _time(model, inputs, wanted, train=train)
    return NodeTrial(map_tree(Tensor.detach, outputs), forward, backward, kept, draws, mixes)


def _look_at_rows(member: PlainMember, model: nn.Module, inputs: Tree) -> tuple[DrawShapes | str, bool]:
    """Return what the rows draw, or why they can't be divided, and whether a row's output depends on others."""
    rows = len(leaves(inputs)[0])
    many = map_tree(lambda leaf: (leaf if rows > 1 else torch.cat([leaf, leaf]))[:MAX_ROWS], inputs)
    rows = len(leaves(many)[0])
    half = (rows + 1) // 2
    seed, step = torch.tensor(member.seed), torch.tensor(member.step)
    whole, few = ConstantStreams(seed, step), ConstantStreams(seed, step)
    try:
        with torch.no_grad():
            with DrawFromStreams(whole):
                outputs = call(model, map_tree(torch.clone, many))
            with DrawFromStreams(few):
                outputs_of_half = call(model, map_tree(lambda leaf: leaf[:half].clone(), many))
    except NotImplementedError as error:
        return str(error), False
    draws = row_axes(whole.shapes, rows, few.shapes, half)
    pairs = zip(leaves(outputs), leaves(outputs_of_half), strict=False)
    own = [(one[:half], other) for one, other in pairs if one.dim() and len(one) == rows]
    mixes = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training for module in model.modules()
    )
    return draws, mixes or not close([one for one, _ in own], [other for _, other in own], 1e-3)


def _time(
    model: nn.Module, inputs: Tree, wanted: Collection[int], *, train: bool
) -> tuple[float, float, int, Tree]:
    """Return the seconds of a forward and a backward pass, the bytes between them, and the outputs."""
    flat, kept = leaves(inputs), 0
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: set[int] = set()

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        place = tensor.untyped_storage().data_ptr()
        if place not in own | seen:
            seen.add(place)
            kept += tensor.untyped_storage().nbytes()
        return tensor

    forwards, backwards, outputs = [], [], None
    for _ in range(TIMES):
        seen.clear()
        kept = 0
        roots = [leaf.clone().requires_grad_(train and index in wanted) for index, leaf in enumerate(flat)]
        arguments = rebuild(inputs, [root.clone() for root in roots])
        begun = time.perf_counter()
        with torch.set_grad_enabled(train), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            outputs = call(model, arguments)
        forwards.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        ends = [leaf for leaf in leaves(outputs) if leaf.requires_grad] if train else []
        leads = [root for root in (*roots, *model.parameters()) if root.requires_grad]
        if ends and leads:
            torch.autograd.grad(ends, leads, [torch.ones_like(end) for end in ends], allow_unused=True)
        backwards.append(time.perf_counter() - begun)
    return min(forwards), min(backwards), kept, outputs

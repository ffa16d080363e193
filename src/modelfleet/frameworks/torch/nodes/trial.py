"""Trials of a node before the training: what it makes of a few rows, what it draws, and how long it takes."""

import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from modelfleet.errors import InputError
from modelfleet.frameworks.node_engine import NodeTrial, TrialInputs
from modelfleet.frameworks.torch.base import explained
from modelfleet.frameworks.torch.devices import restoring_generators
from modelfleet.frameworks.torch.global_modes import KeepingModes
from modelfleet.frameworks.torch.modes import in_mode, training_modes
from modelfleet.frameworks.torch.nodes.saved import saved_bytes
from modelfleet.frameworks.torch.parallel.row_independence import close, row_axes
from modelfleet.frameworks.torch.plain.contexts import PlainContexts
from modelfleet.frameworks.torch.plain.member import PlainMember
from modelfleet.frameworks.torch.plain.trials import scratch_copy
from modelfleet.frameworks.torch.python_state.undo import undoing_side_effects
from modelfleet.frameworks.torch.random.eager import EagerDraws
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import DrawShapes
from modelfleet.frameworks.torch.random.trial_streams import ConstantStreams
from modelfleet.frameworks.torch.task import call
from modelfleet.trees import leaves, map_tree, map_trees, paths, rebuild
from modelfleet.types import Tree

TIMES = 2  # that a node is timed
MAX_TEXT = 40  # characters of a value in an error


def try_node(
    member: PlainMember,
    contexts: PlainContexts,
    inputs: TrialInputs,
    wanted: Collection[int],
    *,
    train: bool,
    evaluating: bool = False,
) -> NodeTrial:
    """Return what a node does with some rows. The node and torch's generators stay as they are.

    Args:
        member: The node's member.
        contexts: Its contexts.
        inputs: What the model is called with.
        wanted: Numbers of the leaves of the inputs that take a gradient.
        train: True to try it in training mode, with a backward pass.
        evaluating: True if it stays in evaluation mode.

    Raises:
        InputError: The model can't take the inputs, can't be copied, or returns something other than tensors.
    """
    model = scratch_copy(member.model)
    if model is None:
        raise InputError(
            f"stage {member.name!r} can't be copied, so it can't be tried before the training. Remove what "
            f"copy.deepcopy can't copy from its attributes."
        )
    with (
        explained(member.name, member.model, inputs.whole),
        KeepingModes(member.device.type),
        undoing_side_effects(("self", model)),
        restoring_generators(member.device),
        in_mode(model, train=train and not evaluating, given=training_modes(member.model)),
        contexts.autocast(),
    ):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        outputs, fewer, draws, drawn, mixes = _look(member, model, inputs)
        changed = _changed_buffers(model, before)
        forward, backward, kept = _time(model, inputs.whole, wanted, train=train)
    return NodeTrial(outputs, fewer, forward, backward, kept, draws, mixes or bool(changed), changed, drawn=drawn)


_Look = tuple[Tree, Tree, DrawShapes | str, int, bool]


def _look(member: PlainMember, model: nn.Module, inputs: TrialInputs) -> _Look:
    """Look at the rows without gradients, or with them, if the model computes gradients itself."""
    try:
        with torch.no_grad():
            return _look_at_rows(member, model, inputs)
    except RuntimeError as error:
        if "grad" not in str(error):
            raise
    return _look_at_rows(member, model, inputs)


def _look_at_rows(member: PlainMember, model: nn.Module, inputs: TrialInputs) -> _Look:
    """Return the outputs for all rows and for fewer, what the rows draw, how often, and whether they depend on
    each other.

    What they draw is a text if it can't be divided by rows.
    """
    few = map_trees(lambda pair: _first_rows(*pair), [inputs.whole, inputs.fewer])
    seed, step = torch.tensor(member.seed), torch.tensor(member.step)
    streams = [ConstantStreams(seed, step) for _ in range(2)]
    try:
        outputs, fewer = (
            _tried(member, model, tree, DrawFromStreams(stream))
            for tree, stream in zip((inputs.whole, few), streams, strict=True)
        )
        draws = row_axes(streams[0].shapes, inputs.rows, streams[1].shapes, inputs.fewer_rows)
    except NotImplementedError as error:  # a draw that has no rule
        counted = EagerDraws(member.seed, member.step)
        outputs, fewer = _tried(member, model, inputs.whole, counted), _tried(member, model, few, nullcontext())
        return outputs, fewer, str(error), counted.count, False
    # Some embeddings divide their gradients by how often a word is in the batch.
    mixes = any(
        (isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training)
        or getattr(module, "scale_grad_by_freq", False)
        for module in model.modules()
    )
    own = [_first_rows(whole, part) for whole, part in zip(leaves(outputs), leaves(fewer), strict=True)]
    mixes = mixes or not close(own, leaves(fewer), 1e-3)
    return outputs, fewer, draws, len(streams[0].shapes), mixes


def _changed_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of the buffers whose numbers are others than before."""
    own = dict(model.named_buffers())
    return frozenset(name for name in before if name in own and not torch.equal(own[name], before[name]))


def _tried(member: PlainMember, model: nn.Module, inputs: Tree, draws: AbstractContextManager[object]) -> Tree:
    """Return the outputs of a model."""
    with draws:
        return detached(call(model, map_tree(torch.clone, inputs)), member.name)


def detached(outputs: Tree, name: str) -> Tree:
    """Return a node's outputs without their graph.

    Raises:
        InputError: They are not all tensors.
    """
    if not leaves(outputs):
        raise InputError(
            f"node {name!r} returns {outputs!r}, but tensors go over edges. Let its forward return some."
        )
    for path, leaf in paths(outputs):
        if not isinstance(leaf, Tensor):
            raise InputError(
                f"node {name!r} returns {_described(leaf)}{path and f' at {path}'}, but only tensors "
                f"go over edges. Let it return tensors, alone or in tuples, lists and dicts."
            )
    return map_tree(Tensor.detach, outputs)


def _described(value: object) -> str:
    """Return what a node has returned, in a few words."""
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= MAX_TEXT else f"a {type(value).__name__}"


def _first_rows(whole: Tensor, few: Tensor) -> Tensor:
    """Return the first rows of a tensor, as many as another one has, along the axis in which the two differ."""
    axes = [axis for axis, pair in enumerate(zip(whole.shape, few.shape, strict=False)) if pair[0] != pair[1]]
    if whole.dim() != few.dim() or len(axes) != 1 or few.shape[axes[0]] > whole.shape[axes[0]]:
        return whole if whole.shape == few.shape else few
    return whole.narrow(axes[0], 0, few.shape[axes[0]])


def _time(model: nn.Module, inputs: Tree, wanted: Collection[int], *, train: bool) -> tuple[float, float, int]:
    """Return the seconds of a forward and a backward pass, and the bytes between them."""
    flat, kept = leaves(inputs), 0
    forwards, backwards = [], []
    for turn in range(TIMES):
        roots = [leaf.clone().requires_grad_(train and index in wanted) for index, leaf in enumerate(flat)]
        arguments = rebuild(inputs, [root.clone() for root in roots])
        begun = time.perf_counter()
        with torch.set_grad_enabled(train):
            if turn == 0:  # which warms up
                outputs, kept = saved_bytes(model, lambda given=arguments: call(model, given))
            else:
                outputs = call(model, arguments)
        forwards.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        ends = [leaf for leaf in leaves(outputs) if leaf.requires_grad] if train else []
        if ends:  # of a copy, whose gradients nobody sees; `torch.utils.checkpoint` may refuse `autograd.grad`
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        backwards.append(time.perf_counter() - begun)
        model.zero_grad()
    return min(forwards), min(backwards), kept

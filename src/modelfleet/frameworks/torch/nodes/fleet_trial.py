"""Trials of a node that is a fleet: one member shows what it draws, and all of them how long a step takes."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from modelfleet.errors import InputError
from modelfleet.frameworks.node_engine import NodeTrial, TrialInputs
from modelfleet.frameworks.torch.fused.steps import Steps
from modelfleet.frameworks.torch.nodes.trial import TIMES, try_node
from modelfleet.frameworks.torch.plain.contexts import PlainContexts
from modelfleet.frameworks.torch.plain.member import PlainMember
from modelfleet.frameworks.torch.python_state.checks import StatefulError, refuse_unstackable
from modelfleet.frameworks.torch.python_state.snapshot import PythonSnapshot
from modelfleet.frameworks.torch.python_state.undo import restoring_python, restoring_tensors
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tree

Run = Callable[[Tree, dict[str, Tensor]], Tree]
"""Runs all members on some inputs with these parameters. It changes nothing."""


@contextmanager
def refusing_python_state(node: str, steps: Steps) -> Iterator[None]:
    """Run the Python of a fleet's first member for all, and undo what it changes beside tensors that are given.

    Raises:
        InputError: It changes something that another member's Python, or the next step, would see.
    """
    try:
        refuse_unstackable(steps.model)
        snapshot = PythonSnapshot([("self", steps.model)])
        snapshot.refuse()
        with restoring_python(snapshot), restoring_tensors(snapshot):
            yield
    except StatefulError as error:
        raise InputError(
            f"the fleet {node!r} can't be a node: the Python of its first member runs for all of them, and {error}"
            f". Keep such state in buffers, or make a node of each member."
        ) from error


def try_fleet(
    first: PlainMember,
    run: Run,
    params: dict[str, Tensor],
    inputs: TrialInputs,
    wanted: Collection[int],
    *,
    members: int,
    train: bool,
) -> NodeTrial:
    """Return what a fleet does with some rows.

    Args:
        first: A member of the fleet, for what each of them draws and keeps.
        run: Runs all members.
        params: Their stacked parameters.
        inputs: The rows.
        wanted: Numbers of the leaves of `inputs` that take a gradient.
        members: The number of members.
        train: True to try it in training mode, with a backward pass.
    """
    one = try_node(first, PlainContexts(first), inputs, wanted, train=train)
    forwards, backwards, outputs = [], [], None
    for _ in range(TIMES):
        flat = leaves(inputs.whole)
        roots = [leaf.clone().requires_grad_(train and index in wanted) for index, leaf in enumerate(flat)]
        given = iter(roots)
        own = {name: tensor.detach().requires_grad_(train) for name, tensor in params.items()}
        begun = time.perf_counter()
        with torch.set_grad_enabled(train):
            outputs = run(map_tree(lambda _, given=given: next(given), inputs.whole), own)
        forwards.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        ends = [leaf for leaf in leaves(outputs) if leaf.requires_grad]
        leads = [root for root in (*roots, *own.values()) if root.requires_grad]
        if ends and leads:
            torch.autograd.grad(ends, leads, [torch.ones_like(end) for end in ends], allow_unused=True)
        backwards.append(time.perf_counter() - begun)
    return replace(
        one,
        outputs=map_tree(Tensor.detach, outputs),
        forward=min(forwards),
        backward=min(backwards),
        kept_bytes=one.kept_bytes * members,
        own_streams=True,
    )

"""Compute what stays the same from step to step only once, in a traced graph that runs uncompiled.

A step computes with constants, with numbers of each member, such as a dropout rate, and with seeds. These inputs
are the same tensors at every step, and dozens of small operations depend on nothing else. So they run when such an
input has changed, and their results are kept for the steps after that.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

from torch import Tensor, fx

from modelfleet.frameworks.torch.random.operations import is_random
from modelfleet.frameworks.torch.tracing.in_place import in_place
from modelfleet.frameworks.torch.tracing.writes import UNDECLARED_WRITERS, is_write, memory_owners, written
from modelfleet.trees import leaves

MAX_BYTES = 2**24  # of a result that is kept


def uncompiled(module: fx.GraphModule, steady: Sequence[int]) -> Callable[..., Any]:
    """Return a traced graph as a function that reuses memory, and the results of its steady inputs.

    Args:
        module: The graph.
        steady: The indices of the inputs that are the same tensors at most steps.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    parts = split_steady(graph, steady)
    if parts is None:
        return in_place(module).forward
    once, taken = parts
    return SteadyGraph(in_place(fx.GraphModule(module, graph)), fx.GraphModule(module, once), taken).forward


class SteadyGraph:
    """Graph in two parts: one that depends on steady inputs alone, and one for every step.

    Args:
        module: The graph for every step. Its last inputs are the results of `once`.
        once: The other part.
        steady: The indices of the inputs that `once` takes.
    """

    def __init__(self, module: fx.GraphModule, once: fx.GraphModule, steady: Sequence[int]) -> None:
        self._run, self._once, self.steady = module.forward, once.forward, tuple(steady)
        # The steady inputs, their versions, and the results of `once`.
        self._known: tuple[list[Tensor], list[int], list[Tensor]] | None = None

    def forward(self, *inputs: Tensor) -> Any:
        """Run one step."""
        return self._run(*inputs, *self._kept(inputs))

    def bound(self, inputs: Sequence[Tensor]) -> Callable[[], Any]:
        """Return a function that runs one step on these tensors, with the steady ones as they are now."""
        return partial(self._run, *inputs, *self._kept(inputs))

    def _kept(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        given = [inputs[index] for index in self.steady]
        known, now = self._known, [tensor._version for tensor in given]
        if known is None or now != known[1] or not all(map(is_, given, known[0])):
            known = self._known = given, now, self._once(*given)
        return known[2]


def split_steady(graph: fx.Graph, steady: Sequence[int]) -> tuple[fx.Graph, list[int]] | None:
    """Take the operations that depend on steady inputs alone out of a graph, in place.

    Args:
        graph: The graph. It gets an input for each result that it needs, after its own.
        steady: The indices of the steady inputs.

    Returns:
        A graph that computes these results, and the indices of the inputs that it takes; None if there are none.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    chosen = {inputs[index] for index in steady}
    owners = {node: set(memory_owners(node)) for node in graph.nodes}
    kept_out = {owner for node in graph.nodes for one in written(node) for owner in owners[one]}
    output = next(node for node in graph.nodes if node.op == "output")
    kept_out |= {owner for node in output.all_input_nodes for owner in owners[node]}
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        known = all(used in chosen or used in found for used in node.all_input_nodes)
        if known and _may_be_kept(node) and kept_out.isdisjoint(owners[node]):
            found[node] = None
    results = [node for node in found if any(user not in found for user in node.users)]
    # Constants are worth it on an accelerator, where each of them is a launch.
    if not any(used in chosen for node in found for used in node.all_input_nodes) and not any(
        map(_launches, results)
    ):
        return None
    once = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    taken = [node for node in inputs if node in chosen and any(user in found for user in node.users)]
    for node in (*taken, *found):
        copies[node] = once.node_copy(node, copies.__getitem__)
    once.output([copies[node] for node in results])
    for result in results:
        with graph.inserting_after(inputs[-1]):
            given = graph.placeholder(f"kept_{result.name}")
        given.meta = dict(result.meta)
        result.replace_all_uses_with(given, delete_user_cb=lambda user: user not in found)
        inputs.append(given)
    for node in reversed(found):
        graph.erase_node(node)
    return once, [index for index in steady if inputs[index] in taken]


def _launches(node: fx.Node) -> bool:
    values = [value for value in leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return any(value.device.type != "cpu" for value in values)


def _may_be_kept(node: fx.Node) -> bool:
    if node.op != "call_function" or is_random(node.target) or is_write(node):
        return False
    if node.target in UNDECLARED_WRITERS or node.is_impure():
        return False
    values = [value for value in leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return bool(values) and all(
        isinstance(value.numel(), int) and value.numel() * value.element_size() <= MAX_BYTES for value in values
    )

"""The pieces of a torch model: traced, timed and grouped (see `frameworks.pieces.Pieces`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree

from modelfleet.errors import InputError
from modelfleet.formatting import without_period
from modelfleet.frameworks.grouping import crossing_bytes, group
from modelfleet.frameworks.pieces import BuiltStage, CannotCutError, Piece, Timing
from modelfleet.frameworks.torch.arrays import place
from modelfleet.frameworks.torch.building import copy_model, seeding, without_callers_contexts
from modelfleet.frameworks.torch.cutting.atoms import lay_out
from modelfleet.frameworks.torch.cutting.building import StageBuilder
from modelfleet.frameworks.torch.cutting.changes import State
from modelfleet.frameworks.torch.cutting.checking import check
from modelfleet.frameworks.torch.cutting.exporting import trace_operations, without_cache
from modelfleet.frameworks.torch.cutting.measuring import Part, gradients, kept_bytes, measure, trained_tensors
from modelfleet.frameworks.torch.cutting.recording import run, time_nodes
from modelfleet.frameworks.torch.cutting.stage import paths_in
from modelfleet.frameworks.torch.cutting.symbolic import trace_children, trace_modules
from modelfleet.frameworks.torch.cutting.traced import Traced, rows_of, with_rows
from modelfleet.frameworks.torch.task import call
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tree

Trace = Callable[[nn.Module, Tree], Traced]
WAYS: tuple[Trace, ...] = (trace_children, trace_modules, trace_operations)
_UNEVEN = 1.2  # a piece that takes so many times a stage's share of the time is worth a finer trace


def pieces(model: nn.Module, stages: int, example: Tree, train: bool) -> "TorchPieces":
    """Return a model's pieces, traced in the first way that allows even stages, or else in the most even way.

    Raises:
        CannotCutError: No way of tracing works.
        InputError: The model does not accept the example.
    """
    device = next((own.device for own in model.parameters()), torch.device("cpu"))
    placed = map_tree(lambda leaf: place(leaf, device), example)
    placed = with_rows(placed, max(2, rows_of(placed)))
    found: list[TorchPieces] = []
    problems: list[CannotCutError] = []
    with without_callers_contexts(), seeding(0):
        _try(model, placed)
        for way in WAYS:
            # Whatever a run changes is changed in the copy.
            copied = copy_model(model).train()
            try:
                own = TorchPieces(model, _traced(way, copied, placed), stages, placed, train)
            except CannotCutError as error:
                problems.append(error)
                continue
            found.append(own)
            if own.is_even(stages):
                break
    if not found:
        raise CannotCutError("; ".join(dict.fromkeys(map(str, problems[1:])))) from problems[-1]
    return max(found, key=lambda own: own.evenness(stages))


class TorchPieces:
    """The pieces of one traced model."""

    def __init__(self, model: nn.Module, traced: Traced, stages: int, example: Tree, train: bool) -> None:
        """Run, group, check and time a traced model.

        Args:
            model: The model whose parameters the stages get.
            traced: A trace of a copy.
            stages: The number of stages that are wanted.
            example: Inputs on the model's device, at least two rows.
            train: Measure the backward pass, too.
        """
        self._model = model
        self._traced = traced
        self._train = train
        self._rows = rows_of(example)
        self._examples = [example, with_rows(example, self._rows + 1)]
        state = State(traced.model)
        record = run(traced, example)
        try:
            other = run(traced, self._examples[1])
        except CannotCutError as error:
            raise CannotCutError(
                f"it takes {self._rows} rows as in the example, but not {self._rows + 1}: {error}"
            ) from error
        layout = lay_out(traced, record)
        self._values = record.values
        self._builder = StageBuilder(traced, layout, record.values, other.values, (self._rows, self._rows + 1))
        seconds = time_nodes(traced, example)
        state.restore()
        crossing = crossing_bytes(len(layout.order), _lifetimes(layout.order, record.values))
        self._ranges = group(layout.boundaries, [seconds[node] for node in layout.order], crossing, stages)
        self._nodes = {node.name: node for node in traced.graph.nodes}
        self._order = layout.order
        self.reasons = (f"cut {traced.how}", *layout.ties)
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        self.inputs: Mapping[str, int] = {node.name: record.values[node].nbytes for node in placeholders}
        self.check([(0, len(self._ranges), ())])
        self.pieces: Sequence[Piece] = self._measured()

    def is_even(self, stages: int) -> bool:
        """Return True if there are enough pieces, and none takes much more than a stage's share of the time."""
        return len(self.pieces) >= stages and self.evenness(stages)[1] >= -_UNEVEN

    def evenness(self, stages: int) -> tuple[bool, float]:
        """Return a key to compare with other ways of tracing."""
        seconds = [piece.timing.total for piece in self.pieces]
        return len(seconds) >= stages, -max(1.0, max(seconds) * stages / (sum(seconds) or 1.0))

    def build(self, start: int, stop: int, outputs: Sequence[str]) -> BuiltStage:
        """Return pieces as a stage that has the model's own parameters."""
        stage, needed = self._built(self._model, start, stop, outputs)
        return BuiltStage(stage, tuple(node.name for node in needed), paths_in(stage, self._model))

    def measure(self, cuts: Sequence[tuple[int, int, Sequence[str]]]) -> list[Timing]:
        """Return the time of each stage."""
        return self._times([self._with_inputs(*cut) for cut in cuts])

    def check(self, cuts: Sequence[tuple[int, int, Sequence[str]]]) -> None:
        """Run stages, and compare them with the model."""
        model = self._traced.model
        built = [(*self._built(model, *cut), cut[2]) for cut in cuts]

        def run_stages(x: Tree) -> Any:
            known: dict[str, Any] = dict(zip(self.inputs, leaves(x), strict=True))
            found: Any = None
            for stage, needed, outputs in built:
                found = stage(*(known[node.name] for node in needed))
                known |= zip(outputs, [found] if len(outputs) == 1 else found if outputs else [], strict=True)
            return found

        with without_callers_contexts(), without_cache(model):
            check(model, [stage for stage, *_ in built], run_stages, self._examples)
            model.train()

    def _built(
        self, owner: nn.Module, start: int, stop: int, outputs: Sequence[str]
    ) -> tuple[nn.Module, list[fx.Node]]:
        first, last = self._ranges[start][0], self._ranges[stop - 1][1]
        nodes = None if last == len(self._order) else [self._nodes[name] for name in outputs]
        return self._builder.build(owner, first, last, nodes)

    def _with_inputs(self, start: int, stop: int, outputs: Sequence[str]) -> Part:
        stage, needed = self._built(self._traced.model, start, stop, outputs)
        return stage, [self._values[node] for node in needed]

    def _times(self, parts: Sequence[Part]) -> list[Timing]:
        self._traced.model.train(self._train)
        for stage, _ in parts:
            stage.train(self._train)
        with without_callers_contexts(), seeding(0):
            found = measure(parts, train=self._train)
        self._traced.model.train()
        return found

    def _measured(self) -> list[Piece]:
        needs = [self._builder.needs(*own) for own in self._ranges]
        later: list[set[fx.Node]] = [set()]
        for own in reversed(needs):
            later.append(later[-1] | set(own))
        later.reverse()  # `later[n]`: what the pieces from `n` on need
        makes = [
            {node.name: self._values[node].nbytes for node in self._order[start:stop] if node in after}
            for (start, stop), after in zip(self._ranges, later[1:], strict=True)
        ]
        parts = [self._with_inputs(number, number + 1, tuple(own)) for number, own in enumerate(makes)]
        timings = self._times(parts)
        return [
            self._piece(number, parts[number], timings[number], makes[number], needs[number])
            for number in range(len(parts))
        ]

    def _piece(
        self, number: int, part: Part, timing: Timing, makes: Mapping[str, int], needs: Sequence[fx.Node]
    ) -> Piece:
        stage, inputs = part
        parameters = list(stage.parameters())
        with without_callers_contexts(), seeding(0):
            kept = kept_bytes(stage, inputs, train=self._train)
        return Piece(
            name=_name(self._order[self._ranges[number][0]]),
            timing=timing,
            parameters=sum(own.numel() for own in parameters),
            weight_bytes=_bytes([*parameters, *stage.buffers()]),
            trained_bytes=_bytes([own for own in parameters if own.requires_grad]) if self._train else 0,
            activation_bytes=kept,
            makes=makes,
            needs=tuple(node.name for node in needs),
        )


def _traced(way: Trace, model: nn.Module, example: Tree) -> Traced:
    """Trace a model, and undo what the trace has changed: a counter, or an attribute that is a proxy now."""
    state = State(model)
    try:
        return way(model, example)
    finally:
        state.restore()


def _try(model: nn.Module, example: Tree) -> None:
    """Raise InputError if a model does not accept an example."""
    copied = copy_model(model).train()
    try:
        found = [leaf for leaf in _pytree.tree_leaves(call(copied, example)) if isinstance(leaf, Tensor)]
        gradients(found, trained_tensors(copied, ()))()
    except Exception as error:  # a user's forward may raise anything
        shapes = map_tree(lambda leaf: f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}", example)
        raise InputError(
            f"the {type(model).__name__} does not accept the example {shapes}: {without_period(error)}. Give an "
            f"example with the shapes and dtypes of a batch's inputs."
        ) from error


def _lifetimes(order: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield for each tensor the index of the node that makes it, that of its last user, and its bytes."""
    position = {node: number for number, node in enumerate(order)}
    for node, number in position.items():
        if isinstance(values[node], Tensor):
            last = max((position.get(user, number) for user in node.users), default=number)
            yield number, last, values[node].nbytes


def _name(node: fx.Node) -> str:
    """Return what a piece that begins at a node is called: the path of its module, or the operation."""
    if node.op == "call_module":
        return str(node.target)
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = stack[-1][0] if stack else ""
    return f"{path} ({node.name})" if path else node.name


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(own.nbytes for own in tensors)

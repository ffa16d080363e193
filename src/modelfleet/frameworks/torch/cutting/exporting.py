"""Trace models by `torch.export`, down to operations of ATen: for models that `torch.fx` can't trace."""

import inspect
import io
import logging
import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import Tensor, fx, nn

from modelfleet.formatting import without_period
from modelfleet.frameworks.pieces import CannotCutError
from modelfleet.frameworks.torch.cutting.modes import merge_modes
from modelfleet.frameworks.torch.cutting.traced import Traced, attribute, rows_of
from modelfleet.frameworks.torch.task import call_arguments
from modelfleet.frameworks.user_code import line_of_error
from modelfleet.trees import map_tree
from modelfleet.types import Tree

_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
_SCOPES = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def trace_operations(model: nn.Module, example: Tree) -> Traced:
    """Trace a model in both modes, so that the graph can switch between them. Its batch may have any size.

    Raises:
        CannotCutError: It can't be traced. The message has the reason and the line.
    """
    problems = []
    for strict in (False, True):
        try:
            with _quietly(), without_cache(model):
                train = _exported(model.train(), example, strict)
                evaluate = _exported(model.eval(), example, strict)
        except CannotCutError:
            raise
        except Exception as error:  # torch.export has no error of its own
            problems.append(_reason(error))
            continue
        graph = merge_modes(train.graph, evaluate.graph)
        read = [node.target for node in graph.nodes if node.op == "get_attr"]
        constants = {path: attribute(train.module, path) for path in read if not _has(model, path)}
        return Traced(graph, model, constants, train.structure, "between its operations (torch.export)")
    raise CannotCutError(f"torch.export can't trace it: {problems[0]}")


class _Exported:
    """The graph of one mode, with nothing in it but placeholders, operations, attributes and the output."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        structure = program.call_spec.out_spec
        assert structure is not None
        self.structure = structure
        self.module = program.module(check_guards=False)
        self.graph = self.module.graph
        self.graph.set_codegen(fx.graph.CodeGen())
        _open_scopes(self.graph, self.module)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node.op == "get_attr" or _is_check(node)):
                self.graph.erase_node(node)


def _exported(model: nn.Module, example: Tree, strict: bool) -> _Exported:
    rows = rows_of(example)
    batch = torch.export.Dim("batch", min=1)

    def shape(leaf: Tensor) -> dict[int, Any] | None:
        return {0: batch} if leaf.ndim and len(leaf) == rows else None

    args, keywords = call_arguments(model, example)
    names = _names(model, args, keywords)
    shapes = {name: map_tree(shape, value) for name, value in names.items()}
    return _Exported(torch.export.export(model, args, keywords, dynamic_shapes=shapes, strict=strict))


def _has(model: nn.Module, path: str) -> bool:
    try:
        attribute(model, path)
    except AttributeError:
        return False
    return True


def _names(model: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of the parameters of `forward`, as torch.export wants their shapes."""
    bound = inspect.signature(model.forward).bind(*args, **keywords)
    return dict(bound.arguments)


def _is_check(node: fx.Node) -> bool:
    name = getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
    return node.op == "call_function" and (name in _CHECKS or not _is_mutable(node))


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _open_scopes(graph: fx.Graph, module: nn.Module) -> None:
    """Replace what the model computes under `no_grad` or without autocast by plain operations.

    Results under `no_grad` are detached, which gives the same gradients.
    """
    for node in list(graph.nodes):
        name = getattr(node.target, "_name", None)
        if node.op != "call_function" or name not in _SCOPES:
            continue
        index = next(number for number, arg in enumerate(node.args) if isinstance(arg, fx.Node))
        settings, inner, operands = node.args[:index], node.args[index], node.args[index + 1 :]
        if name == "wrap_with_autocast" and settings[2]:
            raise CannotCutError("it switches autocast on within its forward")
        body = attribute(module, inner.target)
        _open_scopes(body.graph, body)
        with graph.inserting_before(node):
            results = _inlined(graph, body, operands, inner.target)
            if name == "wrap_with_set_grad_enabled" and not settings[0]:
                results = [graph.call_function(torch.ops.aten.detach.default, (own,)) for own in results]
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not inner.users:
            graph.erase_node(inner)


def _inlined(graph: fx.Graph, body: Any, operands: tuple[Any, ...], path: str) -> list[fx.Node]:
    """Copy a graph into another one, and return its outputs there."""
    known: dict[fx.Node, Any] = {}
    inputs = iter(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(inputs)
        elif node.op == "output":
            returned = node.args[0]
            return [known[own] for own in (returned if isinstance(returned, tuple | list) else [returned])]
        else:
            known[node] = graph.node_copy(node, known.__getitem__)
            if node.op == "get_attr":
                known[node].target = f"{path}.{node.target}"
    raise AssertionError("a graph ends with its output")


def _reason(error: BaseException) -> str:
    where = line_of_error(error)
    if "specialized it to be a constant" in str(error):
        return "its code works with the example's number of rows only"
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = without_period(lines[0]) if lines else type(error).__name__
    return f"{text} ({where})" if where else text


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide what torch warns, logs and prints while it traces. What matters is in the exception."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Let a Hugging Face model return no cache of keys and values, which only generation needs."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, "use_cache", False):
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = True

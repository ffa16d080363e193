"""Trace models by `torch.fx`: submodules stay what they are, with their hooks and their modes."""

from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.utils import _pytree

from modelfleet.formatting import without_period
from modelfleet.frameworks.pieces import CannotCutError
from modelfleet.frameworks.torch.cutting.traced import Traced, attribute
from modelfleet.frameworks.torch.task import call
from modelfleet.frameworks.user_code import line_of_error
from modelfleet.trees import leaves, rebuild
from modelfleet.types import Tree

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def trace_children(model: nn.Module, example: Tree) -> Traced:
    """Trace a Sequential down to its children, which stay whole. Nested Sequentials are opened.

    Raises:
        CannotCutError: The model is no Sequential.
    """
    if not _is_plain_sequential(model):
        raise CannotCutError("it is no nn.Sequential")
    tracer = _Tracer(example, lambda module: not _is_plain_sequential(module))
    return tracer.traced(model, "between the children of its nn.Sequential")


def trace_modules(model: nn.Module, example: Tree) -> Traced:
    """Trace a model down to modules of torch, and to those that can't be traced inside.

    Raises:
        CannotCutError: The model itself can't be traced. The message has the reason and the line.
    """
    whole: set[nn.Module] = set()
    while True:
        tracer = _Tracer(example, lambda module: module in whole or _is_torchs_own(module))
        try:
            return tracer.traced(model, "between its modules (torch.fx)")
        except _InsideError as error:
            whole.add(error.module)


class _InsideError(Exception):
    """Raised for a submodule that can't be traced inside. It is traced as a whole then."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(type(module).__name__)
        self.module = module


class _Tracer(fx.Tracer):
    """Traces a model called with the structure of an example, whose leaves become the graph's inputs."""

    def __init__(self, example: Tree, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._example = example
        self._is_leaf = is_leaf
        self._structure: _pytree.TreeSpec | None = None

    def traced(self, model: nn.Module, how: str) -> Traced:
        before = set(vars(model))
        try:
            graph = self.trace(model)
        except _InsideError:
            raise
        except Exception as error:  # a model's forward may raise anything
            where = line_of_error(error)
            raise CannotCutError(
                f"torch.fx can't trace it{f' ({where})' if where else ''}: {without_period(error)}"
            ) from error
        assert self._structure is not None
        made = set(vars(model)) - before
        constants = {
            node.target: attribute(model, node.target)
            for node in graph.nodes
            if node.op == "get_attr" and node.target in made
        }
        return Traced(graph, model, constants, self._structure, how)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name != "" and self._is_leaf(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if m is self.root or self.is_leaf_module(m, self.path_of_module(m)):
            return super().call_module(m, forward, args, kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except _InsideError:
            raise
        except Exception as error:  # a module's forward may raise anything
            raise _InsideError(m) from error

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        count = len(leaves(self._example))
        inputs = [self.create_proxy("placeholder", f"input_{number}", (), {}) for number in range(count)]
        model: Any = self.root

        def run() -> tuple[Any, ...]:
            flat, self._structure = _pytree.tree_flatten(call(model, rebuild(self._example, inputs)))
            return tuple(flat)

        return run, []


def _is_plain_sequential(module: nn.Module) -> bool:
    if type(module).forward is not nn.Sequential.forward:
        return False
    return not any(getattr(module, name) for name in _HOOKS)


def _is_torchs_own(module: nn.Module) -> bool:
    # A parametrized module has a class of its own in torch.nn.utils.
    return type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) and not _is_plain_sequential(module)

"""A stage of a cut model: a module whose forward is the code of a part of the model's graph."""

import types
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree

from modelfleet.frameworks.pieces import CannotCutError
from modelfleet.frameworks.torch.cutting.traced import Traced, attribute


class Stage(nn.Module):
    """Computes a part of a model, with the model's own parameters, buffers and submodules at their paths there.

    It holds its forward as source code. So it can be pickled, copied, and compared with others.
    """

    def __init__(self, code: str, structure: "Structure | None") -> None:
        """Make a stage that has nothing yet of what its code reads.

        Args:
            code: The code, which defines `forward(self, …)`.
            structure: For the last stage, how what the code returns forms the model's output.
        """
        super().__init__()
        # Names that no submodule of a model has.
        self._code = code
        self._structure = structure

    def forward(self, *inputs: Tensor) -> Any:
        """Return a tensor, or a tuple for several values; from the last stage the model's output."""
        found = function_of(self)(self, *inputs)
        return found if self._structure is None else _assembled(self._structure, iter(found))


def function_of(stage: Stage) -> types.FunctionType:
    """Return the code of a stage as a function of the stage and its inputs."""
    return _function(stage._code)


Structure = tuple[Any, ...]
"""How leaves form an output: `()` for a leaf, else the type of a container, its context, and its children."""


def _as_tuples(structure: _pytree.TreeSpec) -> Structure:
    # torch's own class warns when it is unpickled.
    if structure.is_leaf():
        return ()
    context = structure.context
    children = tuple(map(_as_tuples, structure.children()))
    return structure.type, tuple(context) if isinstance(context, list) else context, children


def _assembled(structure: Structure, leaves: Iterator[Any]) -> Any:
    if not structure:
        return next(leaves)
    kind, context, children = structure
    return _pytree.SUPPORTED_NODES[kind].unflatten_fn([_assembled(child, leaves) for child in children], context)


def make_stage(traced: Traced, owner: nn.Module, graph: fx.Graph, structure: _pytree.TreeSpec | None) -> Stage:
    """Return a stage that runs a graph on what `owner` has: the traced model, or the one that it is a copy of."""
    stage = Stage(_code(graph), None if structure is None else _as_tuples(structure))
    for node in graph.nodes:
        if node.op == "call_module":
            _put_module(stage, owner, node.target)
        elif node.op == "get_attr":
            _put_attribute(stage, owner, node.target, traced.constants)
    stage.training = owner.training
    return stage


def paths_in(stage: nn.Module, model: nn.Module) -> dict[str, str]:
    """Return the name in the model for each parameter and buffer of a stage."""
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    own = (*stage.named_parameters(), *stage.named_buffers())
    return {name: names[id(tensor)] for name, tensor in own if id(tensor) in names}


def _put_module(stage: nn.Module, owner: nn.Module, path: str) -> None:
    holder, source = _holder(stage, owner, path)
    name = path.rpartition(".")[2]
    setattr(holder, name, getattr(source, name))


def _put_attribute(stage: nn.Module, owner: nn.Module, path: str, constants: Mapping[str, Tensor]) -> None:
    if path in constants:
        holder, _ = _holder(stage, None, path)
        holder.register_buffer(path.rpartition(".")[2], constants[path], persistent=False)
        return
    holder, source = _holder(stage, owner, path)
    name = path.rpartition(".")[2]
    value = attribute(owner, path)
    if name == "training":  # the module has its own
        return
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        persistent = name in source._buffers and name not in source._non_persistent_buffers_set
        if name not in holder._buffers:
            holder.register_buffer(name, value, persistent=persistent)
    else:
        setattr(holder, name, value)


def _holder(stage: nn.Module, owner: nn.Module | None, path: str) -> tuple[nn.Module, Any]:
    """Return the modules of the stage and of the model that hold the last name of a path. Makes empty modules."""
    holder, source = stage, owner
    for name in path.split(".")[:-1]:
        source = None if source is None else getattr(source, name)
        if not hasattr(holder, name):
            inner = nn.Module()
            inner.training = True if source is None else source.training
            holder.add_module(name, inner)
        holder = getattr(holder, name)
    return holder, source


def _code(graph: fx.Graph) -> str:
    """Return a graph as source code that imports what it needs."""
    written = graph.python_code("self")
    imports = [_import(name, value) for name, value in written.globals.items() if name in written.src]
    return "\n".join([*imports, written.src.strip(), ""])


def _import(name: str, value: Any) -> str:
    # Everything of torch is written as `torch.…`.
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, float):
        return f"{name} = float('{value}')"
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module is None or module == "__main__" or not own.isidentifier():
        raise CannotCutError(f"it calls {own or value!r}, which can't be imported in another process")
    return f"from {module} import {own} as {name}"


@lru_cache(maxsize=1024)
def _function(code: str) -> types.FunctionType:
    scope: dict[str, Any] = {}
    exec(compile(code, "<stage>", "exec"), scope)
    return scope["forward"]

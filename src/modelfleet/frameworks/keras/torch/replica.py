"""Keras models on torch that only predict, and their variables as NumPy arrays."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.functional import Replica
from modelfleet.frameworks.keras.replica import is_double
from modelfleet.frameworks.keras.steps import outputs
from modelfleet.frameworks.keras.torch.contexts import unfiltered_errors
from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.devices import out_of_memory
from modelfleet.frameworks.torch.tracing.trace import TRACE_LOCK, Program, trace, untraced
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Model, Tree


def replica(model: Model, device: torch.device) -> Replica:
    """Return a replica of a model. On the CPU its weights are not copied."""
    variables = list(model.variables)

    def predict(values: Tree, x: Tree) -> Tree:
        with keras.device(str(device)), unfiltered_errors():
            return outputs(model, list(zip(variables, values, strict=True)), x)

    exact = is_double(variables)
    values = [variable.value.detach().to(device) for variable in variables]
    return Replica(predict, values, _Traced(device), lambda leaf: arrays.place(leaf, device, exact=exact))


class _Traced:
    """A backend for replicas: each form of batch is traced once, and then runs without Keras's Python code."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as traced programs; as plain Python if it can't be traced."""
        programs: dict[str, Program] = {}

        def run(*args: Any) -> Any:
            form = str(map_tree(lambda t: (tuple(t.shape), t.dtype), args[1:]))
            if form not in programs:
                with TRACE_LOCK:
                    programs[form] = _program(function, args)
            with torch.inference_mode():
                return programs[form](leaves(args))

        return run

    def host(self, tree: Tree) -> Tree:
        """Return a tree of tensors as NumPy arrays; bfloat16 as float32."""
        return map_tree(arrays.as_numpy, tree)

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error means that the device is out of memory."""
        return out_of_memory(error)


def _program(function: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    unstacked = [False] * len(args)
    try:
        return trace(function, args, unstacked)
    except CannotFuseError:
        return untraced(function, args, unstacked)


def numbers(variable: keras.Variable) -> np.ndarray:
    """Return a variable as a NumPy array; bfloat16 by its bits."""
    return arrays.host(variable.value)


def lend(variable: keras.Variable, array: np.ndarray) -> None:
    """Set a variable to what `numbers` returned. The variable reads that memory."""
    tensor = arrays.restored(array)
    variable.value.data = tensor.view(torch.bfloat16) if variable.value.dtype == torch.bfloat16 else tensor

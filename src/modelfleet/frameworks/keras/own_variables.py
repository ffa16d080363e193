"""Variables of a Keras model, its optimizer and its metrics, by part and name."""

from importlib import import_module

import keras
import numpy as np
from keras import ops

from modelfleet.frameworks.keras.optimizers import built
from modelfleet.frameworks.keras.steps import by_key, optimizer_keys
from modelfleet.frameworks.stacked import Given
from modelfleet.types import Model, State


def variables_by_part(model: Model) -> dict[str, dict[str, keras.Variable]]:
    """Return the variables of a model by the parts of a state. An optimizer has none before the first step."""
    own: list[keras.Variable] = []
    if model.compiled and model.optimizer is not None and model.optimizer.built:
        own = model.optimizer.variables
    trained, kept = model.trainable_variables, model.non_trainable_variables
    metrics = model.metrics_variables if model.compiled else []
    return {
        "params": by_key(trained),
        "buffers": by_key(kept),
        "optimizer": dict(zip(optimizer_keys(own, trained), own, strict=True)),
        "metrics": by_key(metrics),
    }


def variable_bytes(model: Model) -> int:
    """Return the size of all variables of a model."""
    found = (variable for own in variables_by_part(model).values() for variable in own.values())
    return sum(int(np.prod(v.shape)) * np.dtype(_numpy_dtype(v)).itemsize for v in found)


def copied_values(model: Model) -> State:
    """Return a copy of the values of all variables, for `assign_values`."""
    return {
        part: {key: ops.copy(variable.value) for key, variable in own.items()}
        for part, own in variables_by_part(model).items()
    }


def assign_values(model: Model, values: State) -> None:
    """Set variables to values by part and name."""
    found = variables_by_part(model)
    for part, own in values.items():
        for key, value in own.items():
            found[part][key].assign(value)


def assign_rows(model: Model, state: Given) -> None:
    """Set variables to the first row of a state's tensors or NumPy arrays. Other variables stay the same."""
    if state.get("optimizer"):  # an optimizer has no variables before the first step
        built(model)
    for part, own in variables_by_part(model).items():
        for key, variable in own.items():
            if key not in state.get(part, {}):
                continue
            value = state[part][key][0]
            if isinstance(value, np.ndarray | np.generic) and str(variable.dtype) == "bfloat16":
                arrays = import_module(f"modelfleet.frameworks.{keras.backend.backend()}.arrays")
                value = arrays.from_host(np.asarray(value), variable.value)
            variable.assign(value)


def _numpy_dtype(variable: keras.Variable) -> str:
    return {"bfloat16": "float16"}.get(str(variable.dtype), str(variable.dtype))

"""Lanes whose steps are pure functions: of JAX models, and of Keras models on JAX and on TensorFlow.

A `Definition` describes the steps of one member as functions of its state. A `Backend` maps them over the members,
compiles them and loops them over several steps. `FunctionalEngine` is the engine of a lane made of the two, and
`Replica` a model that only predicts. This package imports no framework.
"""

from modelfleet.frameworks.functional.contract import Backend, Definition, Slice, State
from modelfleet.frameworks.functional.engine import FunctionalEngine
from modelfleet.frameworks.functional.merged_definition import MergedDefinition
from modelfleet.frameworks.functional.programs import Programs
from modelfleet.frameworks.functional.replica import Replica

__all__ = [
    "Backend",
    "Definition",
    "FunctionalEngine",
    "MergedDefinition",
    "Programs",
    "Replica",
    "Slice",
    "State",
]

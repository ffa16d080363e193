"""Lanes whose steps are pure functions: of JAX models, and of Keras models on JAX and on TensorFlow.

A `Definition` says what one member does, as functions of its state; a `Backend` maps them over the members,
compiles them and loops them over several steps; `FunctionalEngine` makes a lane of the two, and `Replica` a model
that only answers. No framework is known here.
"""

from modelfleet.frameworks.functional.contract import Backend, Definition, State
from modelfleet.frameworks.functional.engine import FunctionalEngine
from modelfleet.frameworks.functional.programs import Programs
from modelfleet.frameworks.functional.replica import Replica

__all__ = ["Backend", "Definition", "FunctionalEngine", "Programs", "Replica", "State"]

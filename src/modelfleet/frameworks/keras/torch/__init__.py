"""Keras on torch: a lane's engine on the torch adapter's machinery, with Keras's own pure functions in it.

A Keras model on torch is stepped like any torch model: its stacked variables go through one traced program, which
is compiled if that pays. The loss, the metrics and the optimizer's update come from `keras.steps.Steps`.
"""

from modelfleet.frameworks.keras.torch.contexts import drawing
from modelfleet.frameworks.keras.torch.engine import KerasTorchEngine as Engine
from modelfleet.frameworks.keras.torch.engine import apart
from modelfleet.frameworks.keras.torch.replica import lend, numbers, replica
from modelfleet.frameworks.keras.torch.timing import timed_programs

__all__ = ["Engine", "apart", "drawing", "lend", "numbers", "replica", "timed_programs"]

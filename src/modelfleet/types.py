"""Names for the values that cross the boundary between modelfleet, its users and the frameworks.

A value that only one framework understands has no Python type that all frameworks share. These names say what such
a value is where `Any` would say nothing. Everything else has a real type.
"""

from typing import Any, Literal, TypeAlias

import numpy as np

Model: TypeAlias = Any
"""User's model: an `nn.Module`, a Keras model, a Flax module, or a JAX module with its parameters."""
Tensor: TypeAlias = Any
"""Tensor of the framework at work: `torch.Tensor`, `jax.Array`, `tf.Tensor`."""
NativeDevice: TypeAlias = Any
"""Device as the framework itself names it, such as `torch.device("cuda:0")`."""
Tree: TypeAlias = Any
"""Dicts, lists and tuples, nested, with tensors or arrays at the leaves; or a single tensor or array."""
Data: TypeAlias = Any
"""Training data: arrays `(x, y)`, a loader, a data set, a function that returns an iterator, or `each(...)`."""
OptimizerLike: TypeAlias = Any
"""Optimizer for `compile`: a name, a class of `torch.optim`, a Keras or an Optax optimizer."""
LossLike: TypeAlias = Any
"""Loss for `compile`: a name, a function `loss(output, target)`, or a Keras loss."""
MetricLike: TypeAlias = Any
"""Metric for `compile`: a name, a function `metric(output, target)`, or a Keras metric."""
ScheduleLike: TypeAlias = Any
"""Schedule for `compile`: a name, a `Schedule`, or a function that makes a scheduler."""
Signature: TypeAlias = Any
"""Structure of a model. Models with equal signatures can be fused."""
Json: TypeAlias = Any
"""Value that `json.dumps` takes."""

Array: TypeAlias = np.ndarray
Arrays: TypeAlias = dict[str, np.ndarray]
"""Arrays on the host by path, such as `params/0.weight`."""
State: TypeAlias = dict[str, dict[str, Any]]
"""State of some members by part and name. Each leaf is a tensor with the member as its first axis."""

Strategy = Literal["auto", "fused", "interleaved", "threads", "processes", "data_parallel"]
SharingName = Literal["interleaved", "threads", "processes", "data_parallel"]
Precision = Literal["float32", "bf16", "fp16"]
Kind = Literal["train", "evaluate", "predict"]
"""Verb that a lane serves."""

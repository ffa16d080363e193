"""Plain functions of rows, and objects with a `predict`, such as scikit-learn's models. They only predict.

A fleet does not take them, since they can't be trained here. So this package is not one of `frameworks.ADAPTERS`,
and exports only what replicas need of an adapter.
"""

from modelfleet.frameworks import arrays
from modelfleet.frameworks.batch_parts import inputs
from modelfleet.frameworks.python.devices import choose, memory, native
from modelfleet.frameworks.python.replica import Replica, is_model, needed, weight_bytes

NAME = "python"
PRECISIONS = ("float32",)  # a function chooses its own dtypes

"""Plain functions of rows, and whatever has a `predict`, as scikit-learn's models have: to be asked only.

No fleet takes them: nothing here knows how they would be trained. So this is not one of `frameworks.ADAPTERS`, and
has only what replicas ask of an adapter.
"""

from modelfleet.frameworks import arrays
from modelfleet.frameworks.batches import inputs
from modelfleet.frameworks.python.devices import choose, memory, native
from modelfleet.frameworks.python.replica import Replica, is_model, needed, weight_bytes

NAME = "python"
PRECISIONS = ("float32",)  # a function computes in whatever it likes

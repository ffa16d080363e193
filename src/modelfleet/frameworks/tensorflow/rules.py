"""Rules for operations that `tf.vectorized_map` can't vectorize, although a vectorized form is simple."""

from contextlib import suppress

import tensorflow as tf


def register() -> None:
    """Register the rules that `vectorized_map` lacks. Operations without a rule run one member at a time."""
    # TensorFlow 2.21 has no public way to add one; a later one may have them all, and refuse (KeyError).
    with suppress(ImportError, AttributeError, KeyError):
        from tensorflow.python.ops.parallel_for import pfor

        def bitcast(given: "pfor._PforInput") -> "pfor.WrappedTensor":
            return pfor.wrap(tf.bitcast(given.stacked_input(0), given.get_attr("type")), True)

        pfor.RegisterPFor("Bitcast")(bitcast)  # within Keras's argmax, and so in accuracies

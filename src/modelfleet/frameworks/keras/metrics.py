"""Metrics of Keras models by modelfleet's names."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import keras

from modelfleet.frameworks.metrics import note_metric
from modelfleet.types import LossLike, MetricLike

# Names that Keras does not have.
METRICS: Mapping[str, Callable[[], keras.Metric]] = {
    "r2": lambda: keras.metrics.R2Score(name="r2"),
    "rmse": lambda: keras.metrics.RootMeanSquaredError(name="rmse"),
    "top_5": lambda: keras.metrics.SparseTopKCategoricalAccuracy(5, name="top_5"),
}


@contextmanager
def naming_metrics() -> Iterator[None]:
    """Note on an error which metric raised it. Keras computes all of them in one call."""
    try:
        yield
    except Exception as error:
        owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        metrics = [one for one in owners if isinstance(one, keras.Metric)]
        # Keras's own list of all metrics is a metric, too. An unknown name has its own error.
        if metrics and not type(metrics[-1]).__module__.endswith("compile_utils"):
            note_metric(error, metrics[-1].name)
        raise


def resolve(metrics: MetricLike, loss: LossLike) -> MetricLike:
    """Return metrics for one member, nested as given. Metric objects are copied, since they hold counts."""
    if isinstance(metrics, Mapping):
        return {key: resolve(value, loss) for key, value in metrics.items()}
    if isinstance(metrics, list | tuple):
        return [resolve(value, loss) for value in metrics]
    logits = isinstance(loss, str) and loss in ("bce_with_logits", "binary_cross_entropy_with_logits")
    if metrics == "accuracy" and logits:
        return keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)
    if isinstance(metrics, keras.metrics.Metric):
        return type(metrics).from_config(metrics.get_config())
    return METRICS[metrics]() if isinstance(metrics, str) and metrics in METRICS else metrics

"""Which values of a metric are better: lower ones or higher ones."""

import re
from typing import Literal

from modelfleet.errors import InputError
from modelfleet.unknown_names import unknown

Mode = Literal["auto", "min", "max"]

# The last word of a metric's name decides: "val_mean_squared_error" is an error.
_LOWER_IS_BETTER = re.compile("loss|error|mse|mae|rmse|msle|rmsle|mape|nll|bce|crossentropy|perplexity")
_HIGHER_IS_BETTER = re.compile("accuracy|acc|auc|auroc|auprc|r2|f1|precision|recall|iou|dice")
_TOP_K = re.compile(r"(^|_)top_?(k|\d+)$")


def direction(metric: str, mode: str = "auto") -> Literal["min", "max"]:
    """Return "min" if lower values of a metric are better, "max" if higher ones are.

    Args:
        metric: The name of the metric, which decides if `mode` is "auto".
        mode: "min" or "max" to decide regardless of the name.

    Raises:
        InputError: If the name does not tell which is better, or the mode is unknown.
    """
    if mode == "min" or mode == "max":
        return mode
    if mode != "auto":
        raise unknown("mode", mode, ("auto", "min", "max"))
    name = re.sub(r"[^a-z0-9]+", "_", metric.lower()).replace("cross_entropy", "crossentropy")
    words = name.removesuffix("_score").split("_")
    if "neg" not in words:  # scikit-learn's neg_mean_squared_error is better when higher
        if _LOWER_IS_BETTER.fullmatch(words[-1]):
            return "min"
        if _HIGHER_IS_BETTER.fullmatch(words[-1]) or _TOP_K.search(name):
            return "max"
    raise InputError(
        f'it is not known whether a higher or a lower {metric!r} is better. Say which: mode="min" or mode="max".'
    )

"""Distillation between members: each one also learns from what the others answer."""

import math
from typing import Literal

from modelfleet.callbacks import Callback
from modelfleet.errors import InputError

Compare = Literal["auto", "probabilities", "outputs"]


class Distill(Callback):
    """Have each member also learn from the others' predictions: deep mutual learning.

        fleet.fit(data, epochs=20, exchange=mf.Distill(weight=1.0, temperature=2.0))

    At every step, all members first predict the rows of each member's batch as `predict` does: in evaluation mode,
    without gradients, with the weights from before the step. A member's loss is then

        its own loss + weight * temperature² * KL(p ‖ q)     if probabilities are compared
        its own loss + weight * mean((o - output)²)          if outputs are compared

    where `q` is the softmax of the member's outputs divided by the temperature, `p` is the mean of the same for
    the other members, and `o` is the mean of their outputs. Each is a mean over the rows of the batch. With a
    binary loss, `q` is the sigmoid, and KL the mean over the outputs. The `loss` of an epoch includes what is
    added; `val_loss` and the metrics do not.

    Members that have failed, stopped or finished take no part. A member without others learns from its own loss.
    Members must be models of torch or JAX with a loss, and train in this process.

    Args:
        weight: The weight of what a member learns from the others.
        temperature: The temperature of probabilities. Above 1, small probabilities count more.
        compare: "auto" compares probabilities for losses with classes ("cross_entropy", "nll", "bce_with_logits"
            and their modules in torch), and outputs for all others that have a name. For a loss of your own, say
            "probabilities" or "outputs".

    Raises:
        InputError: An argument is out of range. `fit` raises it if a member has no loss, "auto" can't decide, or
            outputs have different shapes.
    """

    together = True

    def __init__(self, weight: float = 1.0, *, temperature: float = 1.0, compare: Compare = "auto") -> None:
        for argument, value in (("weight", weight), ("temperature", temperature)):
            if isinstance(value, bool) or not 0 < value < math.inf:
                raise InputError(f"Distill: {argument} is {value!r}, expected a number above 0.")
        if compare not in ("auto", "probabilities", "outputs"):
            raise InputError(f'Distill: compare is {compare!r}, expected "auto", "probabilities" or "outputs".')
        self.weight = float(weight)
        self.temperature = float(temperature)
        self.compare: Compare = compare

"""Losses of `compile`, as far as all frameworks have them in common: their names."""

from collections.abc import Mapping
from typing import TypeVar

from modelfleet.errors import InputError
from modelfleet.types import LossLike
from modelfleet.unknown_names import unknown

ALIASES: Mapping[str, str] = {
    "l1": "mae",
    "binary_cross_entropy": "bce",
    "binary_cross_entropy_with_logits": "bce_with_logits",
}

Loss = TypeVar("Loss")


def find_loss(loss: LossLike, known: Mapping[str, Loss]) -> Loss | None:
    """Return the loss of a name; None for a function, which the caller knows how to take.

    Raises:
        InputError: The name is unknown, or `loss` is neither a name nor a function.
    """
    if isinstance(loss, str):
        name = ALIASES.get(loss, loss)
        if name not in known:
            raise unknown("loss", loss, [*known, *ALIASES])
        return known[name]
    if isinstance(loss, type):
        raise InputError(f"the loss is the class {loss.__name__}. Pass an instance: {loss.__name__}().")
    if not callable(loss):
        raise InputError(f"the loss is a {type(loss).__name__}. Pass a name or a function of output and target.")
    return None


def no_loss_by_row(name: str, shape: tuple[int, ...] = ()) -> InputError:
    """Return the error for sample weights beside a function that is not known to be a mean over the rows.

    Args:
        name: The name of the loss.
        shape: What it returns for a batch.
    """
    if shape:
        returns = f"{shape} for the batch, where the mean, one number, is expected"
    else:
        returns = "one number for the batch"
    return InputError(
        f"sample_weight needs the loss of every row, and the loss {name!r} returns {returns}. Use a loss with a "
        f"name or, for torch, a module of torch.nn with reduction='mean'. Or compile with an objective: "
        f"fit((x, y, w)) gives it the weights in its batch."
    )

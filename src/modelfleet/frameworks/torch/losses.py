"""Losses of torch members, computed per row so that padded rows can be left out."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelfleet.errors import InputError
from modelfleet.frameworks.losses import find_loss, no_loss_by_row
from modelfleet.frameworks.target_checks import IGNORED, TargetKind, takes_classes
from modelfleet.frameworks.torch.structure import signature
from modelfleet.frameworks.torch.target_checks import check_fit, shape_of
from modelfleet.types import LossLike, Tree

PartsOfBatch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Loss:
    """Loss of an output and a target."""

    name: str
    rows: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None
    """Return the sum of the loss over each row's elements and their number, both `(row,)`.

    None for a user's function, which only returns a mean.
    """
    plain: Callable[[Tree, Tree], Tensor]
    """Return the mean over all elements, as `torch.nn.functional` does."""
    kind: TargetKind = "any"
    unchecked: Callable[[Tensor, Tensor], Tensor] | None = None
    """Return what `plain` does, for outputs and targets of shapes and dtypes that `plain` has accepted before."""
    parts: PartsOfBatch | None = None
    """For some losses without `rows`: return a sum and a count for a part of a batch.

    The batch's loss is the sum of all sums over the sum of all counts. If the count is None, the loss is a sum.
    """
    weighable: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """For some losses without `rows`: what `rows` returns, for batches with sample weights only."""


def resolve(loss: LossLike) -> Loss:
    """Return the loss of a name, or of a function or `nn.Module` that takes an output and a target."""
    named = find_loss(loss, LOSSES)
    if named is not None:
        return named
    return _stock(loss) or _own(loss)


def resolve_each(losses: Sequence[LossLike]) -> list[Loss | None]:
    """Return the loss of every member. Members that give the same object get the same loss.

    Modules of one class compute in the same way, also one whose numbers are torch's defaults: so that label
    smoothing of 0 and of 0.1 can be fused.
    """
    kinds = {type(loss) for loss in losses}
    alike = len(kinds) == 1 and isinstance(losses[0], nn.Module)
    unlike_stock = alike and any(_stock(loss) is None for loss in losses)
    known: dict[int, Loss | None] = {id(None): None}
    for loss in losses:
        if id(loss) not in known:
            known[id(loss)] = _own(loss) if unlike_stock else resolve(loss)
    return [known[id(loss)] for loss in losses]


def _stock(loss: LossLike) -> Loss | None:
    """Return the named loss that a function or a module of torch equals, if any."""
    for stock, function, module in _STOCK:
        if loss is function or (type(loss) is module and signature(loss) == signature(module())):
            return stock
    return None


def _own(loss: LossLike) -> Loss:
    name = getattr(loss, "__name__", type(loss).__name__)
    return Loss(name, None, loss, parts=_parts(loss), weighable=_weighable(loss))


def _weighable(loss: LossLike) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Return `Loss.weighable` for torch's own modules whose loss is a mean over the elements."""
    if type(loss) not in {module for _, _, module in _STOCK} or loss.reduction != "mean":
        return None

    def rows(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        own = copy.copy(loss)  # at every call: its options may change
        own.reduction = "none"
        values = own(output, target).unsqueeze(-1)
        counted = torch.ones_like(values)
        if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
            if loss.weight is not None:
                raise InputError(
                    f"sample_weight was given beside {type(loss).__name__}(weight=...), which divides by the sum "
                    f"of the classes' weights, so the loss is not the mean of the rows' losses. Leave out "
                    f"weight=, and multiply sample_weight by the weight of each row's class."
                )
            if not target.is_floating_point():
                counted = (target != loss.ignore_index).unsqueeze(-1)
        return _per_row(values, counted)

    return rows


def _parts(loss: LossLike) -> PartsOfBatch | None:
    """Return `Loss.parts` for torch's own modules whose loss is not the mean of its parts' losses."""
    if type(loss) not in {module for _, _, module in _STOCK}:
        return None
    if loss.reduction == "sum":
        return lambda output, target: (loss(output, target), None)
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or loss.reduction != "mean":
        return None

    def parts(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if target.is_floating_point():  # probabilities: the loss is a mean over the rows
            mean, count = loss(output, target), target.numel() // target.shape[1]
            return mean * count, torch.as_tensor(count, dtype=mean.dtype, device=mean.device)
        there = target != loss.ignore_index
        counted = there.to(output.dtype)
        if loss.weight is not None:
            counted = counted * loss.weight[torch.where(there, target, 0)].to(output.dtype)
        count = counted.sum()
        function: Any = F.nll_loss
        options: dict[str, Any] = {"ignore_index": loss.ignore_index, "reduction": "sum"}
        if isinstance(loss, nn.CrossEntropyLoss):
            function, options["label_smoothing"] = F.cross_entropy, loss.label_smoothing
        total = function(output, target, loss.weight, **options)
        return total, count

    return parts


def weighted(
    loss: Loss, output: Tensor, target: Tensor, weights: Tensor | None, own: Tensor | None = None
) -> Tensor:
    """Return the mean of the loss over the elements of the rows that count.

    Args:
        loss: The loss.
        output: The model's output.
        target: The target.
        weights: `(row,)`: 1 for a row that counts and 0 for padding; None if every row counts. With all weights 0
            the result is 0.
        own: `(row,)`: the user's sample weights, by which the losses of the rows are multiplied, or None.
    """
    sums, counts = by_row(loss, output, target, own)
    if weights is None:
        return sums.sum() / counts.sum()
    # If every label is ignored, the loss is 0 / 0, as in torch. A member without rows has a loss of 0.
    size = torch.where(weights.any(), (weights * counts).sum(), 1)
    return (weights * sums).sum() / size


def by_row(loss: Loss, output: Tree, target: Tree, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum of the loss over each row's elements, times the row's own weight, and their number.

    Raises:
        InputError: The loss is a function that returns one number for a whole batch.
    """
    rows = loss.rows or loss.weighable
    if rows is None:
        raise no_loss_by_row(loss.name, tuple(getattr(loss.plain(output, target), "shape", ())))
    sums, counts = rows(output, target)
    return (sums if own is None else own.to(sums.dtype) * sums), counts


def matched(name: str, output: Tree, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return an output and a target in one dtype. Raises InputError if their shapes differ."""
    check_fit(name, "values", shape_of(name, output), target)
    return _same_dtype(output, target)


def _same_dtype(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    # A float64 target is only NumPy's default. A float32 target beside a half-precision output is meant.
    known = target.dtype if target.is_floating_point() else output.dtype
    dtype = torch.promote_types(output.dtype, torch.float32 if known == torch.float64 else known)
    return output.to(dtype), target.to(dtype)


def _per_row(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    # At least in float32: sums of halves are rough, and a half can't count beyond 2048.
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.to(dtype).flatten(1).sum(1), counted.to(dtype).flatten(1).sum(1)


def _named(name: str, function: Callable[..., Tensor], kind: TargetKind = "values") -> Loss:
    """Return the loss of a function as torch has them, with a `reduction`."""

    classes = takes_classes(kind)

    def are_labels(target: Tensor) -> bool:
        return classes and not target.is_floating_point()

    def in_dtype(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (output, target.long()) if are_labels(target) else _same_dtype(output, target)

    def match(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        check_fit(name, kind, shape_of(name, output), target)
        return in_dtype(output, target)

    def rows(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output, target = match(output, target)
        values = function(output, target, reduction="none").unsqueeze(-1)
        counted = (target != IGNORED).unsqueeze(-1) if are_labels(target) else torch.ones_like(values)
        return _per_row(values, counted)

    def plain(output: Tensor, target: Tensor) -> Tensor:
        return function(*match(output, target), reduction="mean")

    def unchecked(output: Tensor, target: Tensor) -> Tensor:
        return function(*in_dtype(output, target), reduction="mean")

    return Loss(name, rows, plain, kind, unchecked)


def _reduced(values: Tensor, reduction: str) -> Tensor:
    return values.mean() if reduction == "mean" else values


# torch 2.13 has no batching rules for the next three in F, and would loop over the members.


def _kl_div(output: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    return _reduced(torch.xlogy(target, target) - target * output, reduction)


def _soft_margin(output: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    return _reduced(-F.logsigmoid(target * output), reduction)


def _multi_margin(output: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    label = target.unsqueeze(1)
    margins = (1 - output.gather(1, label) + output).clamp(min=0)
    others = torch.arange(output.shape[1], device=output.device) != label
    return _reduced((margins * others).sum(1) / output.shape[1], reduction)


# Each loss with the function and the module of torch that it equals.
_STOCK: tuple[tuple[Loss, Callable[..., Tensor], type[nn.Module]], ...] = (
    (
        _named("cross_entropy", F.cross_entropy, "classes or probabilities"),
        F.cross_entropy,
        nn.CrossEntropyLoss,
    ),
    (_named("nll", F.nll_loss, "classes"), F.nll_loss, nn.NLLLoss),
    (_named("multi_margin", _multi_margin, "classes"), F.multi_margin_loss, nn.MultiMarginLoss),
    (_named("mse", F.mse_loss), F.mse_loss, nn.MSELoss),
    (_named("mae", F.l1_loss), F.l1_loss, nn.L1Loss),
    (_named("huber", F.huber_loss), F.huber_loss, nn.HuberLoss),
    (_named("smooth_l1", F.smooth_l1_loss), F.smooth_l1_loss, nn.SmoothL1Loss),
    (_named("poisson_nll", F.poisson_nll_loss), F.poisson_nll_loss, nn.PoissonNLLLoss),
    (_named("kl_div", _kl_div), F.kl_div, nn.KLDivLoss),
    (_named("bce", F.binary_cross_entropy, "fractions"), F.binary_cross_entropy, nn.BCELoss),
    (
        _named("bce_with_logits", F.binary_cross_entropy_with_logits, "fractions"),
        F.binary_cross_entropy_with_logits,
        nn.BCEWithLogitsLoss,
    ),
    (
        _named("hinge_embedding", F.hinge_embedding_loss, "signs"),
        F.hinge_embedding_loss,
        nn.HingeEmbeddingLoss,
    ),
    (_named("soft_margin", _soft_margin, "signs"), F.soft_margin_loss, nn.SoftMarginLoss),
)

LOSSES: dict[str, Loss] = {loss.name: loss for loss, _, _ in _STOCK}

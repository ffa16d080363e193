"""Losses with a number per member: label smoothing, margins, betas and deltas.

Each rule takes the arguments of torch's function. A number is a tensor without axes below `vmap`, in float64.
Weights of classes need no rule: torch's functions take a tensor per member as they are.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfleet.frameworks.torch.tracing.number_dropout import Rules
from modelfleet.frameworks.torch.tracing.number_functions import like


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: Any = 0.0,
) -> Tensor:
    axis = 1 if input.dim() > 1 else 0
    classes = input.shape[axis]
    logs = torch.log_softmax(input, axis)
    smoothing = like(label_smoothing, logs)
    weights = None if weight is None else weight.to(logs.dtype).view(-1, *[1] * (input.dim() - 1 - axis))
    if target.is_floating_point():
        shares = target * (1 - smoothing) + smoothing / classes
        losses = -(logs * shares if weights is None else logs * shares * weights).sum(axis)
        return losses if reduction == "none" else losses.sum() / (_rows(losses) if reduction == "mean" else 1)
    ignored = target == ignore_index
    label = torch.where(ignored, 0, target)
    exact = -logs.gather(axis, label.unsqueeze(axis)).squeeze(axis)
    smooth = -(logs if weights is None else logs * weights).sum(axis)
    own = None if weight is None else weight.to(logs.dtype)[label]
    exact = exact if own is None else exact * own
    losses = torch.where(ignored, 0.0, (1 - smoothing) * exact + smoothing / classes * smooth)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    counted = torch.where(ignored, 0.0, torch.ones_like(losses) if own is None else own)
    return losses.sum() / counted.sum()


def _rows(losses: Tensor) -> int:
    return max(losses.numel(), 1)


def _smooth_l1(
    input: Tensor,
    target: Tensor,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    beta: Any = 1.0,
) -> Tensor:
    off, beta = (input - target).abs(), like(beta, input)
    positive = torch.where(beta > 0, beta, 1.0)
    quadratic = torch.where(off < beta, 0.5 * off.square() / positive, off - 0.5 * beta)
    return _reduced(quadratic, reduction)


def _huber(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: Any = 1.0, weight: Tensor | None = None
) -> Tensor:
    difference, delta = input - target, like(delta, input)
    off = difference.abs()
    losses = torch.where(off <= delta, 0.5 * difference.square(), delta * (off - 0.5 * delta))
    if weight is None:
        return _reduced(losses, reduction)
    losses = losses * weight
    return losses.sum() / weight.sum() if reduction == "mean" else _reduced(losses, reduction)


def _margin_ranking(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: Any = 0,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
) -> Tensor:
    return _reduced((-target * (input1 - input2) + like(margin, input1)).clamp_min(0), reduction)


def _hinge_embedding(
    input: Tensor,
    target: Tensor,
    margin: Any = 1.0,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
) -> Tensor:
    apart = torch.where(target == 1, 0.0, (like(margin, input) - input).clamp_min(0))
    return _reduced(apart + torch.where(target == -1, 0.0, input), reduction)


def _triplet_margin(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: Any = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
) -> Tensor:
    near, far = F.pairwise_distance(anchor, positive, p, eps), F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduced((like(margin, anchor) + near - far).clamp_min(0), reduction)


def _cosine_embedding(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: Any = 0,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
) -> Tensor:
    # Without a margin, opposite pairs have the loss max(0, cos). The margin is subtracted before that maximum.
    tiny = 1e-12  # as in torch
    product = (input1 * input2).sum(-1)
    lengths = (input1.square().sum(-1) + tiny) * (input2.square().sum(-1) + tiny)
    cosine = product / lengths.sqrt()
    apart = (cosine - like(margin, input1)).clamp_min(0)
    losses = torch.where(target == 1, 1 - cosine, torch.where(target == -1, apart, 0.0))
    return _reduced(losses, reduction)


def _poisson_nll(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    size_average: None = None,
    eps: Any = 1e-8,
    reduce: None = None,
    reduction: str = "mean",
) -> Tensor:
    eps = like(eps, input)
    losses = input.exp() - target * input if log_input else input - target * torch.log(input + eps)
    if full:
        stirling = target * torch.log(target) - target + 0.5 * torch.log(2 * torch.pi * target)
        losses = losses + torch.where(target > 1, stirling, 0.0)
    return _reduced(losses, reduction)


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


RULES: Rules = {
    F.cross_entropy: (_cross_entropy, ("label_smoothing",)),
    F.smooth_l1_loss: (_smooth_l1, ("beta",)),
    F.huber_loss: (_huber, ("delta",)),
    F.margin_ranking_loss: (_margin_ranking, ("margin",)),
    F.hinge_embedding_loss: (_hinge_embedding, ("margin",)),
    F.triplet_margin_loss: (_triplet_margin, ("margin",)),
    F.cosine_embedding_loss: (_cosine_embedding, ("margin",)),
    F.poisson_nll_loss: (_poisson_nll, ("eps",)),
}

"""Rules for attention with padded heads, of unequal number or size.

Heads of zeros stay zero: all their scores are equal, and their values are zero. A padded head adds nothing to its
scores, but is scaled by the root of its own size.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfleet.frameworks.torch.widths.padded_calls import Axes, Size
from modelfleet.frameworks.torch.widths.padding import PaddedCall
from modelfleet.frameworks.torch.widths.regrouping import Group, regrouped, whole
from modelfleet.frameworks.torch.widths.rule_helpers import refuse_other_numbers

_PARAMETERS = tuple(inspect.signature(F.multi_head_attention_forward).parameters)


def scaled_attention(call: PaddedCall) -> Tensor:
    """Compute attention of padded heads."""
    refuse_other_numbers(call)
    query, key, value = call.axes[:3]
    if any(own[-2] for own in (query, key, value)) or any(map(any, call.axes[3:])):
        raise call.refuse("has a rule for unequal numbers and sizes of heads only")
    if call.argument(7, "enable_gqa", False) and any((query[-3], key[-3])) and _has_other_groups(call):
        raise call.refuse("with enable_gqa has unequal groups of heads")
    args, size = list(call.args), query[-1]
    if size is not None and call.argument(6, "scale") is None:
        args[0] = args[0] * _compensation(call, size, args[0].shape[-1], args[0].dtype)
    with call.drawing((*query[:-1], None), (*call.shapes[0][:-1], call.shapes[1][-2])):
        return call.run(*args)


def multi_head_attention(call: PaddedCall) -> Any:
    """Run `nn.MultiheadAttention` with the weights of each head padded by themselves."""
    given = dict(zip(_PARAMETERS, call.args, strict=True))
    own_embed, own_heads = (call.numbers.get((name,)) for name in ("embed_dim_to_check", "num_heads"))
    _refuse_other_arguments(call, given)
    if own_embed is None and own_heads is None:  # only the features of keys or values are padded
        return call.run()
    embed, variants = given["embed_dim_to_check"], len(own_embed or own_heads or ())
    own_embed = own_embed or (embed,) * variants
    own_heads = own_heads or (given["num_heads"],) * variants
    own_sizes = tuple(whole // count for whole, count in zip(own_embed, own_heads, strict=True))
    heads: Group = [(max(own_heads), own_heads), (max(own_sizes), own_sizes)]
    if max(own_heads) * max(own_sizes) != embed:
        raise call.refuse("has more heads for one width, and larger ones for another")
    _move_weights(call, given, embed, own_embed, heads)
    given["num_heads"] = max(own_heads)
    averages = given["need_weights"] and given["average_attn_weights"] and len(set(own_heads)) > 1
    if averages:
        given["average_attn_weights"] = False
    with call.drawing(*_weights_form(given, own_heads)):
        output, weights = call.run(*given.values())
    if averages:
        axes = (None,) * (weights.dim() - 3) + (own_heads, None, None)
        total = call.filled(weights, axes).sum(-3)
        return output, total / call.own(own_heads).to(total.dtype)
    return output, weights if weights is None else call.cleared(weights, call.out[1])


def _refuse_other_arguments(call: PaddedCall, given: dict[str, Any]) -> None:
    if call.numbers.keys() - {("embed_dim_to_check",), ("num_heads",)}:
        raise call.refuse("has unequal numbers for unequal widths")
    for name in ("query", "key", "value"):
        if any(call.axes_of(given[name])[:-1]):
            raise call.refuse(f"has no rule for a padded axis of {name}= that is not the last")
    for name in ("attn_mask", "key_padding_mask", "static_k", "static_v"):
        if given[name] is not None and any(call.axes_of(given[name])):
            raise call.refuse(f"has no rule for a padded {name}=")


def _move_weights(call: PaddedCall, given: dict[str, Any], embed: int, own: Size, heads: Group) -> None:
    """Pad weights head by head, and scale those of queries by the size of the own heads."""
    three = (3,) * len(own)
    packed, one = [(3, three), *heads], whole(embed, own)
    for name in ("in_proj_weight", "in_proj_bias"):
        if given[name] is not None:
            own_packed = whole(3 * embed, tuple(3 * size for size in own))
            given[name] = regrouped(call, given[name], 0, own_packed, packed)
    places = {
        "q_proj_weight": 0,
        "k_proj_weight": 0,
        "v_proj_weight": 0,
        "bias_k": 2,
        "bias_v": 2,
        "out_proj_weight": 1,
    }
    for name, dim in places.items():
        if given[name] is not None:
            given[name] = regrouped(call, given[name], dim, one, heads)
    size, own_size = heads[1]
    if len(set(own_size)) == 1:
        return
    for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight"):
        weight = given[name]
        if weight is not None:
            factor = _compensation(call, own_size, size, weight.dtype)
            given[name] = torch.cat([weight[:embed] * factor, weight[embed:]])


def _compensation(call: PaddedCall, own: Size, size: int, dtype: torch.dtype) -> Tensor:
    """Return by what queries are multiplied, so that scores divided by the root of `size` are scaled as alone."""
    return call.own(tuple((size / one) ** 0.5 for one in own)).to(dtype)


def _weights_form(given: dict[str, Any], own_heads: Size) -> tuple[Axes, tuple[int, ...]]:
    """Return the axes and the shape of the attention's weights `(batch, head, query, key)`."""
    query, keys = given["query"], given["key"].shape[0]
    more = (given["bias_k"] is not None) + bool(given["add_zero_attn"])
    axis = own_heads if len(set(own_heads)) > 1 else None
    batch = query.shape[1] if query.dim() == 3 else 1
    return (None, axis, None, None), (batch, max(own_heads), query.shape[0], keys + more)


def _has_other_groups(call: PaddedCall) -> bool:
    """Return True if not all variants have as many heads of queries for one of keys."""
    variants = next(len(own) for own in (call.axes[0][-3], call.axes[1][-3]) if own is not None)
    queries, keys = (
        axes[-3] or (shape[-3],) * variants for axes, shape in zip(call.axes[:2], call.shapes[:2], strict=True)
    )
    return len({divmod(q, k) for q, k in zip(queries, keys, strict=True)}) > 1

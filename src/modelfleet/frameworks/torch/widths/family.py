"""Structures without the sizes in them: members that differ in nothing else are tried in one lane."""

from collections.abc import Hashable
from functools import lru_cache

from torch import nn

from modelfleet.frameworks.structure import Signature
from modelfleet.frameworks.torch.structure import _Module, _Tensor
from modelfleet.frameworks.torch.values import Leaf, Tree

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

_SIZE = Leaf("size", None)
# Attributes of torch's own modules that are sizes of their parameters. Kernels, strides and the like are not.
_SIZES = frozenset(
    {"in_features", "out_features", "in1_features", "in2_features", "in_channels", "out_channels", "groups"}
    | {"num_features", "num_channels", "num_groups", "normalized_shape", "num_embeddings", "embedding_dim"}
    | {"num_parameters", "unflattened_size", "input_size", "hidden_size", "d_model", "nhead"}
    | {"embed_dim", "kdim", "vdim", "num_heads", "head_dim"}
)


def shapes(own: Signature) -> Shapes:
    """Return the shapes of a structure's parameters and buffers by name, and the number and the size of heads.

    Attention of more heads, but smaller ones, is no wider: padding both would compute mostly zeros.
    """
    kinds = _kinds(own)
    found: list[tuple[str, tuple[int, ...]]] = []
    for path, entry in own.entries:
        owner, _, name = path.rpartition(".")
        if isinstance(entry, _Tensor) and entry.shape:
            found.append((path, entry.shape))
        elif name in ("num_heads", "head_dim") and isinstance(entry, Leaf) and _is_attention(kinds.get(owner)):
            assert isinstance(entry.content, int)
            found.append((path, (entry.content,)))
    return tuple(found)


@lru_cache(maxsize=4096)
def without_sizes(own: Signature) -> Signature:
    """Return a structure without the sizes of its layers.

    Kernels keep theirs, and so does everything in torch's own modules that is no size of a parameter. In other
    modules, any integer may be a size.
    """
    kinds = _kinds(own)
    found: list[tuple[str, Hashable]] = []
    for path, entry in own.entries:
        owner, _, name = path.rpartition(".")
        kind = kinds.get(owner)
        if isinstance(entry, _Tensor):
            sizes = 3 if _is_attention(kind) else 2  # bias_k and bias_v are (1, 1, embed_dim)
            shape = None if entry.shape is None else (*[-1] * len(entry.shape[:sizes]), *entry.shape[sizes:])
            found.append((path, entry._replace(shape=shape)))
        elif isinstance(entry, _Module):
            found.append((path, entry))
        elif isinstance(kind, type) and kind.__module__.startswith("torch.nn."):
            found.append((path, _without_integers(entry) if name in _SIZES else entry))
        else:
            found.append((path, _without_integers(entry)))
    return Signature(tuple(found))


def _kinds(own: Signature) -> dict[str, Hashable]:
    return {path: entry.kind for path, entry in own.entries if isinstance(entry, _Module)}


def _is_attention(kind: Hashable) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.MultiheadAttention)


def _without_integers(frozen: Hashable) -> Hashable:
    match frozen:
        case Tree(kind, parts):
            return Tree(kind, tuple((label, _without_integers(part)) for label, part in parts))
        case Leaf(kind, _) if kind is int:
            return _SIZE
    return frozen

"""Operations that are computed in another way while members are stacked.

torch's own way has no batching rule, is slow, or gives another dtype under `vmap` than for one member alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from modelfleet.frameworks.torch.tracing.attention import attention, multi_head_attention
from modelfleet.frameworks.torch.tracing.recurrent import RECURRENT_RULES

Operation = Callable[..., Any]
HALF_DTYPES = (torch.float16, torch.bfloat16)


class BatchingRules(TorchFunctionMode):
    """Context in which the operations of `RULES` are computed by their rules.

    A tensor that a forward creates is at first the same for all members. Random numbers drawn into it are not, and
    vmap refuses that (`torch.empty(8).bernoulli_(p)`). Here the tensor gets a member axis, if nothing else has
    been done with it yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fresh: dict[int, Tensor] = {}  # by id: created in this forward, and not used yet
        self._stacked: Tensor | None = None  # any tensor with a member axis

    def __torch_function__(
        self,
        func: Operation,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func in RANDOM_FILLS and self._stacked is not None and first is not None and self._is_fresh(first):
            del self._fresh[id(first)]
            drawn = self._stacked.new_empty(first.shape, dtype=first.dtype, device=first.device)
            torch.utils.swap_tensors(first, func(drawn, *args[1:], **kwargs))
            return first
        result = RULES.get(func, func)(*args, **kwargs)
        if func in CREATORS and isinstance(result, Tensor):
            self._fresh[id(result)] = result
        elif func not in PROPERTIES:
            for arg in (*args, *kwargs.values()):
                if isinstance(arg, Tensor):
                    self._fresh.pop(id(arg), None)
                    if self._stacked is None and _is_stacked(arg):
                        self._stacked = arg
        return result

    def _is_fresh(self, tensor: Tensor) -> bool:
        """Return True if a tensor has just been created, and is the same for all members."""
        return id(tensor) in self._fresh and not _is_stacked(tensor)


def _is_stacked(tensor: Tensor) -> bool:
    """Return True if a tensor has a member axis, which vmap hides."""
    functorch: Any = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return functorch.is_batchedtensor(tensor)


def _below_vmap() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.einsum("...i,oij,...j->...o", x, weight, y)
    return product if bias is None else product + bias


def _one_hot(labels: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:  # the largest label decides: a shape that depends on values
        return F.one_hot(labels, num_classes)
    return (labels.unsqueeze(-1) == torch.arange(num_classes, device=labels.device)).to(torch.int64)


def _contiguously(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Pooling to one number keeps the memory format with as_strided_, which has no batching rule.
    def pool(x: Tensor, output_size: int | Sequence[int]) -> Tensor:
        return plain(x.contiguous(), output_size)

    return pool


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    # Keras asks for channels_last before a convolution, for speed. vmap has no such format.
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        memory_format = torch.contiguous_format
    return x.contiguous(memory_format=memory_format)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # Under vmap, autocast sees the product but not the bias. Without the cast, everything that follows would be in
    # float32, unlike for one member alone.
    result = F.linear(x, weight, bias)
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and result.dtype == torch.float32:
        return result.to(torch.get_autocast_dtype(kind))
    return result


def _normalization(plain: Callable[..., Tensor], float32_on_gpu: bool) -> Callable[..., Tensor]:
    # For one member alone, a kernel takes half-precision inputs with float32 weights and statistics, computes in
    # float32, and returns half precision. Under vmap, the operations that it is made of get both dtypes, and raise
    # or continue in float32. With `float32_on_gpu`, autocast on a GPU returns float32.
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kind = x.device.type
        if not _below_vmap() or not torch.is_autocast_enabled(kind) or x.dtype not in HALF_DTYPES:
            return plain(x, *args, **kwargs)
        found = plain(x.float(), *args, **kwargs)
        return found if float32_on_gpu and kind != "cpu" else found.to(x.dtype)

    return run


def _in_float32(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Autocast computes losses in float32, but under vmap it sees only the operations that they are made of.
    def run(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled(args[0].device.type):
            args = tuple(_to_float32(arg) for arg in args)
            kwargs = {name: _to_float32(arg) for name, arg in kwargs.items()}
        return loss(*args, **kwargs)

    return run


def _to_float32(arg: Any) -> Any:
    return arg.float() if isinstance(arg, Tensor) and arg.dtype in HALF_DTYPES else arg


def _randperm(n: int, **options: Any) -> Tensor:
    if not _below_vmap():
        return torch.randperm(n, **options)
    # vmap would draw one permutation at a time. This is the order of 64-bit words, as in `Streams.permutation`.
    dtype = options.pop("dtype", None) or torch.int64
    words = torch.randint(-(2**63), 2**63 - 1, (n,), **options)
    return torch.argsort(words, stable=True).to(dtype)


def _rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    if not training or not _below_vmap():
        return F.rrelu(x, lower, upper, training, inplace)
    slopes = lower + (upper - lower) * torch.rand_like(x)
    found = torch.where(x <= 0, x * slopes, x)
    return x.copy_(found) if inplace else found


def _gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    if not hard or not _below_vmap():
        return F.gumbel_softmax(logits, tau, hard, eps, dim)
    soft = F.gumbel_softmax(logits, tau, dim=dim)
    found = soft.argmax(dim, keepdim=True)
    classes = torch.arange(logits.shape[dim], device=logits.device)
    choice = (classes.view(-1, *[1] * (logits.dim() - 1 - dim % logits.dim())) == found).to(logits.dtype)
    return choice - soft.detach() + soft


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    if not _below_vmap():
        return torch._weight_norm(v, g, dim)
    others = [axis for axis in range(v.dim()) if axis != dim]  # a norm of everything has the axis -1
    return v * (g / torch.linalg.vector_norm(v, 2, others, keepdim=True))


def _writing(compute: Callable[..., Tensor], plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not _below_vmap():
            return plain(x, *args, **kwargs)
        return x.copy_(compute(x.clone(), *args, **kwargs))  # the gradient may need what was there

    return run


# Functions that have a batching rule, and none in place.
_NOT_IN_PLACE = (
    "addcdiv addcmul clamp clip cumprod cumsum eq floor_divide fmod ge greater greater_equal gt hypot le lerp "
    "less less_equal lt ne negative not_equal pow remainder square subtract tril triu xlogy"
)
# And whether autocast on a GPU gives float32.
_NORMS = {"layer_norm": True, "group_norm": True, "batch_norm": False, "instance_norm": False}
_LOSSES = (
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy_with_logits,
    F.poisson_nll_loss,
    F.kl_div,
    F.cosine_embedding_loss,
    F.triplet_margin_loss,
    F.margin_ranking_loss,
)

_CONTENTS = ("empty", "zeros", "ones", "full")
CREATORS: frozenset[Operation] = frozenset(
    {Tensor.new}
    | {getattr(torch, name) for name in _CONTENTS}
    | {getattr(torch, f"{name}_like") for name in _CONTENTS}
    | {getattr(Tensor, f"new_{name}") for name in _CONTENTS}
)
_DISTRIBUTIONS = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
RANDOM_FILLS: frozenset[Operation] = frozenset(getattr(Tensor, f"{name}_") for name in _DISTRIBUTIONS)
PROPERTIES: frozenset[Operation] = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel}
    | {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")}
)

RULES: Mapping[Operation, Operation] = {
    **{loss: _in_float32(loss) for loss in _LOSSES},
    **{
        getattr(library, name): _normalization(getattr(library, name), float32_on_gpu)
        for name, float32_on_gpu in _NORMS.items()
        for library in (F, torch)
    },
    torch.randperm: _randperm,
    F.rrelu: _rrelu,
    F.gumbel_softmax: _gumbel_softmax,
    torch.bilinear: _bilinear,
    F.one_hot: _one_hot,
    torch.adaptive_avg_pool1d: _contiguously(torch.adaptive_avg_pool1d),
    F.adaptive_avg_pool2d: _contiguously(F.adaptive_avg_pool2d),
    F.adaptive_avg_pool3d: _contiguously(F.adaptive_avg_pool3d),
    torch._C._nn.adaptive_avg_pool2d: _contiguously(torch._C._nn.adaptive_avg_pool2d),
    F.linear: _linear,
    torch._weight_norm: _weight_norm,
    **{
        getattr(library, f"{name}_"): _writing(getattr(Tensor, name), getattr(library, f"{name}_"))
        for name in _NOT_IN_PLACE.split()
        for library in (Tensor, torch)
        if hasattr(library, f"{name}_")
    },
    Tensor.contiguous: _contiguous,
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: multi_head_attention(scaled_dot_product_attention=attention),
    **RECURRENT_RULES,
}

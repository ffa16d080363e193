"""Attention of stacked members: the numbers of each alone, without a tensor for each query and key."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.frameworks.torch import numbers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import modelfleet as mf
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.frameworks.torch.tracing import attention as attention_module
from modelfleet.frameworks.torch.tracing import attention_kernels
from modelfleet.frameworks.torch.tracing.attention_kernels import Kernel
from modelfleet.frameworks.torch.tracing.batching_rules import BatchingRules

MEMBERS = 3
by_torch: Any = F.scaled_dot_product_attention
attention: Any = attention_module.attention
aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def heads(*lead: int, queries: int = 5, keys: int = 7, features: int = 4) -> tuple[Tensor, ...]:
    """Query, key and value of all members, with some axes before their positions."""
    return tuple(normal(MEMBERS, *lead, length, features) for length in (queries, keys, keys))


def allowed(*shape: int) -> Tensor:
    """A mask that allows some keys, and none to the first query."""
    mask = normal(*shape) > 0
    mask.select(-2, 0)[...] = False
    return mask


SHARED, OWN = None, 0
Mask = tuple[Tensor | None, int | None]
CASES: dict[str, tuple[tuple[Tensor, ...], Mask, dict[str, Any]]] = {
    "plain": (heads(2, 3), (None, SHARED), {}),
    "scaled": (heads(2, 3), (None, SHARED), {"scale": 0.3}),
    "causal": (heads(2, 3), (None, SHARED), {"is_causal": True}),
    "causal, more queries": (heads(2, 3, queries=9), (None, SHARED), {"is_causal": True}),
    "without heads": (heads(2), (None, SHARED), {}),
    "without rows": (heads(), (None, SHARED), {}),
    "more axes": (heads(2, 2, 3), (None, SHARED), {}),
    "one key for all rows": (
        (normal(MEMBERS, 2, 3, 5, 4), normal(MEMBERS, 1, 3, 7, 4), normal(MEMBERS, 1, 3, 7, 4)),
        (None, SHARED),
        {},
    ),
    "groups of heads": (
        (normal(MEMBERS, 2, 6, 5, 4), normal(MEMBERS, 2, 3, 7, 4), normal(MEMBERS, 2, 3, 7, 4)),
        (None, SHARED),
        {"enable_gqa": True},
    ),
    "mask": (heads(2, 3), (allowed(5, 7), SHARED), {}),
    "mask of a member": (heads(2, 3), (allowed(MEMBERS, 5, 7), OWN), {}),
    "mask of a row": (heads(2, 3), (allowed(2, 1, 5, 7), SHARED), {}),
    "mask of a member's row": (heads(2, 3), (normal(MEMBERS, 2, 1, 1, 7), OWN), {}),
    "mask of a head": (heads(2, 3), (normal(MEMBERS, 3, 5, 7), OWN), {}),
    "numbers for keys": (heads(2, 3), (normal(1, 7), SHARED), {}),
    "numbers for queries": (heads(2, 3), (normal(5, 1), SHARED), {}),
    "mask without heads": (heads(2), (normal(2, 5, 7), SHARED), {}),
    "mask of more axes": (heads(2, 2, 3), (normal(2, 1, 1, 5, 7), SHARED), {}),
}


def traced(function: Callable[..., Any], *args: Any) -> list[torch.fx.Node]:
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*args).graph
    graph.eliminate_dead_code()
    return list(graph.nodes)


def results(nodes: Sequence[torch.fx.Node]) -> list[Tensor]:
    found = [node.meta.get("val") for node in nodes if node.op == "call_function"]
    return [
        one
        for val in found
        for one in (val if isinstance(val, tuple | list) else [val])
        if isinstance(one, Tensor)
    ]


@pytest.mark.parametrize("name", CASES)
def test_members_have_the_numbers_of_the_plain_form_alone(name: str) -> None:
    tensors, (mask, axis), options = CASES[name]

    def total(tensors: tuple[Tensor, ...], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        found = by_torch(*tensors, mask, **options)
        return (found * found.cos()).sum(), found.detach()

    def all_members(tensors: tuple[Tensor, ...], mask: Tensor | None) -> Any:
        with BatchingRules():
            return vmap(grad(total, has_aux=True), in_dims=(0, axis))(tensors, mask)

    found = all_members(tensors, mask)
    for member in range(MEMBERS):
        own = tuple(one[member].clone().requires_grad_() for one in tensors)
        with sdpa_kernel(SDPBackend.MATH):
            loss, output = total(own, mask if axis is None or mask is None else mask[member])
        expected = torch.autograd.grad(loss, own), output
        for one, other in zip((*found[0], found[1]), (*expected[0], expected[1]), strict=True):
            torch.testing.assert_close(one[member], other, rtol=0, atol=1e-12)

    nodes = traced(all_members, tensors, mask)
    assert [node.target for node in nodes if node.target in (FLASH, FLASH_BACKWARD)] == [FLASH, FLASH_BACKWARD]


def test_second_derivatives_are_those_of_the_plain_form() -> None:
    tensors, mask = heads(2, 3), allowed(5, 7)

    def penalty(run: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        slopes: Any = grad(lambda own: run(*own, mask).sin().sum())(tensors)
        return torch.stack([(slope**2).sum() for slope in slopes]).sum()

    found: Any = vmap(grad(lambda own: penalty(attention, own)))(tensors)
    with sdpa_kernel(SDPBackend.MATH):
        expected: Any = [
            grad(lambda own: penalty(by_torch, own))(tuple(one[member] for one in tensors))
            for member in range(MEMBERS)
        ]
    for member in range(MEMBERS):
        for one, other in zip(found, expected[member], strict=True):
            torch.testing.assert_close(one[member], other, rtol=0, atol=1e-12)


def test_a_mask_that_is_learnt_gets_its_gradient() -> None:
    tensors, bias = heads(2, 3), normal(MEMBERS, 5, 7)

    def total(bias: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
        return attention(*tensors, bias).sin().sum()

    found: Any = vmap(grad(total))(bias, tensors)
    for member in range(MEMBERS):
        own = bias[member].clone().requires_grad_()
        by_torch(*(one[member] for one in tensors), own).sin().sum().backward()
        torch.testing.assert_close(found[member], own.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_keep_theirs(dtype: torch.dtype) -> None:
    tensors = tuple(one.to(dtype) for one in heads(2, 3))
    found: Any = vmap(attention)(*tensors)
    assert found.dtype == dtype
    for member in range(MEMBERS):
        alone = by_torch(*(one[member] for one in tensors))
        torch.testing.assert_close(found[member], alone, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("mask", [None, allowed(5, 7), normal(5, 7)], ids=["none", "allowed", "added"])
def test_values_of_another_size_take_the_plain_form(mask: Tensor | None) -> None:
    query, key, value = heads(2, 3)
    found: Any = vmap(lambda *own: attention(*own, mask))(query, key, value[..., :2])
    alone = by_torch(query[0], key[0], value[0, ..., :2], mask)
    torch.testing.assert_close(found[0], alone, rtol=0, atol=1e-12)


# --- in models

LENGTH = 37


class Direct(nn.Module):
    """Attention of four heads without a module of its own."""

    def __init__(self, dropout: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.dropout, self.scale = dropout, scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        found = by_torch(q, k, v, is_causal=True, dropout_p=rate, scale=self.scale)
        return found.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` of a sequence with itself, with padding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 4, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, key_padding_mask=x[..., 0] > 2, need_weights=False)[0]


def encoder_layer(dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 4, 16, dropout=dropout, batch_first=True)


class Classifier(nn.Module):
    """A layer on sequences, and a linear one on their mean."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "direct": Direct,
    "nn.MultiheadAttention": SelfAttention,
    "nn.TransformerEncoderLayer": encoder_layer,
}


def squares(fleet: mf.Fleet) -> list[tuple[int, ...]]:
    """Shapes of results in the programs of a fleet that have a number for each query and key."""
    assert fleet._lanes is not None
    runners = list(fleet._lanes[0].engine.programs._all())
    graphs = [runner.program.graph for runner in runners]
    assert graphs
    return [
        tuple(one.shape)
        for graph in graphs
        for one in results(list(graph.graph.nodes))
        if one.numel() % LENGTH**2 == 0
    ]


@pytest.fixture
def without_fast_path() -> Iterator[None]:
    """Members with padding are evaluated one by one where torch has its fast path."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_memory_of_training_is_linear_in_the_sequence(layer: str, without_fast_path: None) -> None:
    fleet = numbers.check(
        lambda _: Classifier(LAYERS[layer]()), [0, 0], features=(LENGTH, 8), optimizer="sgd", lr=0.05
    )
    assert squares(fleet) == []


def test_dropout_of_attention_has_a_number_for_each_query_and_key() -> None:
    fleet = numbers.check(lambda _: Classifier(Direct(0.25)), [0, 0], features=(LENGTH, 8), lr=0.05)
    assert squares(fleet)
    fleet.evaluate(numbers.rows((LENGTH, 8)), batch_size=8)


def test_attention_at_a_rate_per_member_is_evaluated_by_a_fused_kernel(without_fast_path: None) -> None:
    fleet = numbers.compiled(
        numbers.build(lambda rate: Classifier(SelfAttention(rate)), [0.1, 0.3]), loss="cross_entropy"
    )
    fleet.evaluate(numbers.rows((LENGTH, 8)), batch_size=8)
    assert squares(fleet) == []


def test_autocast_gives_attention_the_dtype_that_it_has_alone() -> None:
    tensors = tuple(one.float() for one in heads(2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        alone = by_torch(*(one[0] for one in tensors))
        with BatchingRules():
            found: Any = vmap(by_torch)(*tensors)
    assert found.dtype == alone.dtype == torch.bfloat16
    torch.testing.assert_close(found[0], alone, rtol=1e-2, atol=1e-3)


# --- kernels of accelerators


def test_a_kernel_may_have_seeds_and_want_a_multiple_of_features(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seen = attention_kernels._KERNELS["cpu", SDPBackend.FLASH_ATTENTION], []

    def forward(query: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        seen.append(tuple(query.shape))
        return (*plain.forward(query, *rest), torch.tensor(5), torch.tensor(6))

    def backward(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *tensors, results, causal, scale = rest
        assert [int(seed) for seed in results[2:]] == [5, 6]
        return plain.backward(grad, *tensors, results[:2], causal, scale)

    monkeypatch.setattr(attention_module, "kernel_for", lambda *_: Kernel(forward, backward, multiple=8))
    tensors = heads(2, 3, features=5)
    slopes: Any = vmap(grad(lambda own: attention(*own).sin().sum()))(tensors)
    assert seen == [(MEMBERS * 2, 3, 5, 8)]
    monkeypatch.undo()
    expected: Any = vmap(grad(lambda own: attention(*own).sin().sum()))(tensors)
    for one, other in zip(slopes, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class Called(TorchDispatchMode):
    """Notes which attention kernels are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (SDPBackend.FLASH_ATTENTION, "flash"),
        (SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        (SDPBackend.CUDNN_ATTENTION, "efficient"),
    ],
)
def test_the_kernels_of_cuda_take_what_they_are_given(choice: SDPBackend, expected: str, masked: bool) -> None:
    if masked and expected == "flash":
        pytest.skip("torch never chooses it for a mask")
    kernel = attention_kernels._KERNELS["cuda", choice]
    with FakeTensorMode(), Called() as called:
        query, key, value = (
            torch.empty(6, 3, length, 8, dtype=torch.float16, device="cuda") for length in (5, 16, 16)
        )
        mask = torch.empty(6, 1, 1, 16, dtype=torch.float16, device="cuda") if masked else None
        results = kernel.forward(query, key, value, mask, False, 0.5)
        slopes = kernel.backward(results[0], query, key, value, mask, results, False, 0.5)
    assert results[0].shape == query.shape
    assert results[1].shape[:2] == (6, 3)
    assert [one.shape for one in slopes] == [one.shape for one in (query, key, value)]
    name = f"aten._scaled_dot_product_{expected}_attention"
    assert called.names == [f"{name}.default", f"{name}_backward.default"]


def test_masks_are_laid_out_as_the_efficient_kernel_wants_them() -> None:
    query, key = torch.empty(6, 3, 5, 8), torch.empty(6, 3, 7, 8)
    mask = normal(1, 1, 1, 7)
    found = attention_kernels._aligned(mask, query, key)
    assert found is not None
    assert torch.equal(found, mask.expand(6, 3, 5, 7))
    assert found.stride(-1) == 1
    assert all(stride % 16 == 0 for stride in found.stride()[:-1])


def test_a_kernel_that_drops_out_by_itself_is_refused() -> None:
    seed = torch.zeros(2, dtype=torch.int64)
    with FakeTensorMode(), DrawFromStreams(Streams(seed, seed)):
        query, key, value = (torch.empty(2, 3, length, 8, device="cuda") for length in (5, 7, 7))
        efficient = aten._scaled_dot_product_efficient_attention
        assert efficient(query, key, value, None, True, 0.0)[0].shape == query.shape
        with pytest.raises(NotImplementedError, match="no stream per member"):
            efficient(query, key, value, None, True, 0.25)


def test_the_scale_of_a_member_is_its_own() -> None:
    def make(scale: float) -> nn.Module:
        return Classifier(Direct(scale=scale))

    fleet = numbers.check(make, [0.3, 0.7], features=(LENGTH, 8), optimizer="sgd", lr=0.05)
    assert squares(fleet) == []


class OneHead(nn.Module):
    """Attention over `(row, position, feature)`, without an axis for heads."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(part(x) for part in self.parts)).mean(1)


def test_attention_of_one_head_in_a_fleet_is_as_alone() -> None:
    x, y = normal(20, 5, 8), normal(20, 8)
    fused, plain = (mf.Fleet.build(lambda: OneHead().double(), MEMBERS, seed=1) for _ in range(2))
    for fleet, strategy in ((fused, "fused"), (plain, "interleaved")):
        fleet.compile("sgd", "mse", lr=0.1)
        fleet.fit((x, y), epochs=2, batch_size=8, progress=False, strategy=strategy)
    answers = fused.predict(x, strategy="fused")
    with torch.no_grad():
        for name in fused.names:
            for own, other in zip(fused[name].parameters(), plain[name].parameters(), strict=True):
                torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(torch.as_tensor(answers[name]), plain[name](x), rtol=1e-11, atol=1e-12)

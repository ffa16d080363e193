"""Kernels that draw inside themselves are not used for dropout, and count as no draw without it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import _VF, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from modelfleet.frameworks.torch.random import drawing_kernels
from modelfleet.frameworks.torch.random.drawing_kernels import draws_nothing
from modelfleet.frameworks.torch.random.eager import EagerDraws
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import Streams

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _as_with_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing_kernels, "_may_have_kernels", lambda: True)


class Kernels(TorchDispatchMode):
    """Which kernels torch may choose while operations run: (fused attention, cuDNN)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[bool, bool]] = set()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen.add((torch.backends.cuda.flash_sdp_enabled(), torch._C._get_cudnn_enabled()))
        return func(*args, **(kwargs or {}))


DRAWS: dict[str, Callable[[], Any]] = {
    "eager": lambda: EagerDraws(0, 0),
    "streams": lambda: DrawFromStreams(Streams(torch.tensor(0), torch.tensor(0))),
}


def kernels(draws: str, run: Callable[[], object]) -> set[tuple[bool, bool]]:
    with DRAWS[draws](), Kernels() as found:
        run()
    return found.seen


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize(
    ("device", "rate", "fused"), [("meta", 0.5, False), ("meta", 0.0, True), ("cpu", 0.5, True)]
)
def test_attention(draws: str, device: str, rate: float, fused: bool) -> None:
    x = torch.zeros(1, 2, 3, 4, device=device)
    before = F.scaled_dot_product_attention
    run = lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=rate)  # noqa: E731
    assert kernels(draws, run) == {(fused, True)}
    assert F.scaled_dot_product_attention is before
    layer = nn.MultiheadAttention(4, 2, dropout=rate, batch_first=True, device=device)
    x = torch.zeros(1, 3, 4, device=device)
    assert ((False, True) in kernels(draws, lambda: layer(x, x, x, need_weights=False))) != fused


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    ("device", "rate", "layers", "training", "cudnn"),
    [
        ("meta", 0.5, 2, True, False),
        ("meta", 0.5, 2, False, True),
        ("meta", 0.0, 2, True, True),
        ("cpu", 0.5, 2, True, True),
    ],
)
def test_recurrent_layers(
    draws: str, layer: Callable[..., nn.Module], device: str, rate: float, layers: int, training: bool, cudnn: bool
) -> None:
    model = layer(4, 5, layers, dropout=rate, device=device).train(training)
    seen = kernels(draws, lambda: model(torch.zeros(3, 2, 4, device=device)))
    assert ((True, False) in seen) != cudnn
    assert not vars(_VF).keys() & set(drawing_kernels._RECURRENT)
    assert torch._C._get_cudnn_enabled()


def test_packed_sequences() -> None:
    model = nn.LSTM(4, 5, 2, dropout=0.5, device="meta")
    packed = pack_padded_sequence(torch.zeros(3, 2, 4), torch.tensor([3, 2]))
    packed = packed._replace(data=torch.zeros(packed.data.shape, device="meta"))
    assert (True, False) in kernels("eager", lambda: model(packed))
    assert (True, False) not in kernels("eager", lambda: model.eval()(packed))


@pytest.mark.parametrize(("layers", "training", "given"), [(1, True, 0.0), (2, False, 0.0), (2, True, 0.5)])
@pytest.mark.parametrize("packed", [False, True])
def test_a_rate_that_drops_nothing_is_not_given_to_the_kernel(
    layers: int, training: bool, given: float, packed: bool
) -> None:
    def record(*args: Any) -> Any:
        return args

    run = drawing_kernels._recurrent(record)
    x, sizes = torch.zeros(1, device="meta"), [torch.tensor([1])] if packed else []
    args = (x, *sizes, [x], [x], True, layers, 0.5, training, False)
    expected = (x, *sizes, [x], [x], True, layers, given, training, False)
    assert all(mine is other or mine == other for mine, other in zip(run(*args), expected, strict=True))


def test_threads_leave_in_any_order() -> None:
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        with EagerDraws(0, 0), drawing_kernels.WITHOUT_CUDNN:
            entered.set()
            leave.wait()

    before = F.scaled_dot_product_attention
    other = threading.Thread(target=wait)
    with EagerDraws(0, 0), drawing_kernels.WITHOUT_CUDNN:
        other.start()
        entered.wait()
    assert F.scaled_dot_product_attention is not before
    assert not torch._C._get_cudnn_enabled()
    leave.set()
    other.join()
    assert F.scaled_dot_product_attention is before
    assert torch._C._get_cudnn_enabled()


X: Tensor = torch.zeros(1)
RNN = (X, [X], 4, None, X, X, 2, 5, 0, 2, False)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (aten._scaled_dot_product_efficient_attention.default, (X, X, X, None, True), {}, True),
        (aten._scaled_dot_product_efficient_attention.default, (X, X, X, None, True, 0.1), {}, False),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X), {"dropout_p": 0.1}, False),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X, 0.0, True), {"scale": 0.1}, True),
        (aten._scaled_dot_product_cudnn_attention.default, (X, X, X, None, True, 0.1), {}, False),
        (aten._scaled_dot_product_efficient_attention_backward.default, (X,) * 10 + (0.1,), {}, True),
        (aten._cudnn_rnn.default, (*RNN, 0.0, True, False, [], None), {}, True),
        (aten._cudnn_rnn.default, (*RNN, 0.5, True, False, [], None), {}, False),
        (aten.native_dropout.default, (X, 0.0, True), {}, False),
    ],
)
def test_a_call_draws_if_it_drops(func: Any, args: Any, kwargs: Any, expected: bool) -> None:
    assert draws_nothing(func, args, kwargs) == expected


@pytest.mark.parametrize("draws", DRAWS)
def test_what_drops_nothing_takes_no_number(draws: str) -> None:
    """torch tags the kernel as random. As a draw it would shift the numbers of all draws after it."""
    called: list[Any] = []

    class Kernel(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return (args[0],) * 4 if func in GPU_ONLY else func(*args, **(kwargs or {}))

    GPU_ONLY = {aten._scaled_dot_product_efficient_attention.default}  # noqa: N806
    x, found = torch.zeros(1, 2, 3, 4), []
    for before in (0, 2):
        with Kernel(), DRAWS[draws]():
            for _ in range(before):
                aten._scaled_dot_product_efficient_attention.default(x, x, x, None, False)
            found.append(torch.rand(5))
    assert set(called) >= GPU_ONLY
    assert torch.equal(*found)

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from modelfleet.errors import InputError
from modelfleet.frameworks.torch.losses import LOSSES, resolve, weighted
from modelfleet.frameworks.torch.target_checks import check_targets

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _kl_div(output: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(output, target, reduction="sum") / output.numel()


def _values(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape), torch.randn(shape)


def _fractions(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.rand(shape), torch.rand(shape)


def _signs(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape), torch.randint(2, shape) * 2.0 - 1


def _classes(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape), torch.randint(shape[1], shape[:1] + shape[2:])


def _probabilities(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape), torch.randn(shape).softmax(1)


def _some_ignored(*shape: int) -> tuple[Tensor, Tensor]:
    output, target = _classes(*shape)
    return output, target.where(torch.rand(target.shape) > 0.3, -100)


CASES: list[tuple[str, Function, Callable[..., tuple[Tensor, Tensor]], tuple[int, ...]]] = [
    ("cross_entropy", F.cross_entropy, _classes, (6, 5)),
    ("cross_entropy", F.cross_entropy, _classes, (6, 5, 3)),
    ("cross_entropy", F.cross_entropy, _classes, (6, 5, 3, 2)),
    ("cross_entropy", F.cross_entropy, _some_ignored, (6, 5, 3)),
    ("cross_entropy", F.cross_entropy, _probabilities, (6, 5)),
    ("cross_entropy", F.cross_entropy, _probabilities, (6, 5, 3)),
    ("nll", F.nll_loss, _classes, (6, 5)),
    ("nll", F.nll_loss, _some_ignored, (6, 5, 3)),
    ("multi_margin", F.multi_margin_loss, _classes, (6, 5)),
    ("mse", F.mse_loss, _values, (6,)),
    ("mse", F.mse_loss, _values, (6, 3)),
    ("mae", F.l1_loss, _values, (6, 3, 2)),
    ("huber", F.huber_loss, _values, (6, 3)),
    ("smooth_l1", F.smooth_l1_loss, _values, (6, 3)),
    ("poisson_nll", F.poisson_nll_loss, _fractions, (6, 3)),
    ("kl_div", _kl_div, _fractions, (6, 3)),
    ("bce", F.binary_cross_entropy, _fractions, (6, 1)),
    ("bce_with_logits", F.binary_cross_entropy_with_logits, _fractions, (6, 3)),
    ("hinge_embedding", F.hinge_embedding_loss, _signs, (6, 3)),
    ("soft_margin", F.soft_margin_loss, _signs, (6, 3)),
]
each_case = pytest.mark.parametrize(("name", "function", "make", "shape"), CASES)


def test_every_loss_has_a_case() -> None:
    assert {name for name, *_ in CASES} == set(LOSSES)


@each_case
def test_weights_of_one_give_the_loss_of_torch(
    name: str, function: Function, make: Callable[..., tuple[Tensor, Tensor]], shape: tuple[int, ...]
) -> None:
    output, target = make(*shape)
    loss, expected = resolve(name), function(output, target)
    torch.testing.assert_close(weighted(loss, output, target, torch.ones(shape[0])), expected)
    torch.testing.assert_close(loss.plain(output, target), expected)


@each_case
def test_padded_rows_leave_no_trace_in_the_loss_and_its_gradient(
    name: str, function: Function, make: Callable[..., tuple[Tensor, Tensor]], shape: tuple[int, ...]
) -> None:
    batches = [make(*shape) for _ in range(3)]
    output, target = (torch.stack(tensors) for tensors in zip(*batches, strict=True))
    counts = [6, 4, 1]
    weights = torch.tensor([[1.0] * count + [0.0] * (6 - count) for count in counts])
    loss = resolve(name)

    losses = vmap(lambda o, t, w: weighted(loss, o, t, w))(output, target, weights)
    gradients = vmap(grad(lambda o, t, w: weighted(loss, o, t, w)))(output, target, weights)

    for member, count in enumerate(counts):
        alone = batches[member][0][:count].clone().requires_grad_()
        expected = function(alone, batches[member][1][:count])
        expected.backward()
        torch.testing.assert_close(losses[member], expected.detach(), equal_nan=True)
        torch.testing.assert_close(gradients[member, :count], alone.grad, equal_nan=True)
        if losses[member].isfinite():
            assert gradients[member, count:].abs().sum() == 0


def test_a_member_without_rows_has_loss_and_gradient_zero() -> None:
    output, target = _classes(4, 3)
    loss = resolve("cross_entropy")
    gradient = grad(lambda o: weighted(loss, o, target, torch.zeros(4)))(output)
    assert weighted(loss, output, target, torch.zeros(4)) == 0
    assert (gradient == 0).all()


def test_labels_that_are_all_ignored_give_nan_as_in_torch() -> None:
    output, target = torch.randn(4, 3), torch.full((4,), -100)
    assert weighted(resolve("cross_entropy"), output, target, torch.ones(4)).isnan()


def test_halves_are_summed_and_counted_in_float32() -> None:
    output, target = torch.full((2, 70_000), 0.1, dtype=torch.float16), torch.zeros(2, 70_000)
    loss = weighted(resolve("mse"), output, target.half(), torch.ones(2))
    torch.testing.assert_close(loss, torch.tensor(0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("name", ["mse", "mae", "bce_with_logits"])
def test_targets_of_other_dtypes_are_taken(name: str, dtype: torch.dtype) -> None:
    output, target = torch.randn(4, 1), torch.tensor([[0], [1], [1], [0]])
    loss = resolve(name)
    expected = loss.plain(output, target.float())
    assert loss.plain(output, target.to(dtype)).dtype == torch.float32
    torch.testing.assert_close(loss.plain(output, target.to(dtype)), expected)
    grad(lambda o: loss.plain(o, target.to(dtype)))(output)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_class_indices_may_be_any_integers(dtype: torch.dtype) -> None:
    output, target = _classes(4, 3)
    loss = resolve("cross_entropy").plain(output, target.to(dtype))
    torch.testing.assert_close(loss, F.cross_entropy(output, target))


@pytest.mark.parametrize(
    "name", ["mse", "mae", "huber", "smooth_l1", "bce", "bce_with_logits", "poisson_nll", "kl_div"]
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_target_that_would_broadcast_is_refused(name: str, whole: bool) -> None:
    loss = resolve(name)
    output, target = torch.rand(4, 1), torch.rand(4)
    words = r"output is \(4, 1\), but the target is \(4,\).*Reshape the target to \(row, 1\)"
    with pytest.raises(InputError, match=words):
        loss.plain(output, target) if whole else weighted(loss, output, target, torch.ones(4))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (torch.tensor([0.0, 1.0, 2.0, 0.0]), "class indices as float32. Pass them as integers"),
        (
            torch.zeros(4, 1, dtype=torch.int64),
            r"target is \(4, 1\) of int64.*class indices of shape \(row,\)",
        ),
        (torch.zeros(4, 3, dtype=torch.int64), "or floating-point probabilities of the output's shape"),
    ],
)
def test_class_targets_of_wrong_shape_or_dtype_are_refused(target: Tensor, words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve("cross_entropy").plain(torch.randn(4, 3), target)


def test_an_output_without_classes_is_refused() -> None:
    with pytest.raises(InputError, match=r"\(row, class, …\)"):
        resolve("cross_entropy").plain(torch.randn(4), torch.zeros(4, dtype=torch.int64))


def test_an_output_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(InputError, match="gives a dict, but mse needs a tensor"):
        resolve("mse").plain({"a": torch.ones(2)}, torch.ones(2))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("l1", "mae"),
        ("binary_cross_entropy_with_logits", "bce_with_logits"),
        (F.cross_entropy, "cross_entropy"),
        (F.l1_loss, "mae"),
        (nn.CrossEntropyLoss(), "cross_entropy"),
        (nn.MSELoss(), "mse"),
        (nn.BCEWithLogitsLoss(), "bce_with_logits"),
        (nn.KLDivLoss(), "kl_div"),
    ],
)
def test_stock_losses_are_recognised(given: str | Function, name: str) -> None:
    assert resolve(given) is LOSSES[name]


@pytest.mark.parametrize(
    "given",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        nn.CrossEntropyLoss(reduction="sum"),
        lambda output, target: (output.sum(1) - target).abs().max(),
    ],
)
def test_other_callables_are_kept_as_they_are(given: Function) -> None:
    loss = resolve(given)
    output, target = _classes(4, 3)
    assert loss.rows is None
    assert loss.kind == "any"
    assert loss.plain(output, target) == given(output, target)


def test_names_of_callables() -> None:
    assert resolve(nn.CrossEntropyLoss(label_smoothing=0.1)).name == "CrossEntropyLoss"
    assert resolve(_kl_div).name == "_kl_div"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("cross_entropi", "unknown loss 'cross_entropi'. Did you mean 'cross_entropy'?"),
        (nn.MSELoss, r"the class MSELoss. Pass an instance: MSELoss\(\)"),
        (3, "the loss is a int"),
    ],
)
def test_what_is_no_loss_is_refused(given: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve(given)


@pytest.mark.parametrize(
    ("name", "shape", "target", "words"),
    [
        (
            "cross_entropy",
            (1, 3),
            np.array([0, 1, 7, 9]),
            "member 'm07': the target in row 2 is 7, but the model gives 3 classes: labels go from 0 to 2",
        ),
        ("cross_entropy", (1, 3, 2), [[0, 1], [2, -1]], "the target in row 1 is -1"),
        (
            "cross_entropy",
            (1, 3),
            np.array([0.0, 1.0]),
            "member 'm07': the target holds class indices as float64",
        ),
        ("cross_entropy", (1, 3), np.array([[0], [1]]), r"target is \(2, 1\) of int64"),
        ("cross_entropy", (1, 3), np.array(["a", "b"]), "the target is of <U1; cross_entropy needs numbers"),
        ("cross_entropy", (1, 3), torch.tensor([0, 3], dtype=torch.uint8), "the target in row 1 is 3"),
        ("multi_margin", (1, 3), np.array([0, -100]), "the target in row 1 is -100"),
        ("mse", (1, 1), np.ones(5), r"the output is \(5, 1\), but the target is \(5,\)"),
        ("mse", (1, 2), 3.0, "the target is"),
        (
            "bce_with_logits",
            (1, 1),
            np.array([[0.0], [2.0]]),
            "the target in row 1 is 2.0, but .* takes 0 to 1",
        ),
        ("bce", (1, 1), np.array([[math.nan]]), "the target in row 0 is nan"),
        (
            "soft_margin",
            (1,),
            np.array([1, -1, 0]),
            "the target in row 2 is 0, but soft_margin takes -1 and 1",
        ),
    ],
)
def test_bad_targets_are_named(name: str, shape: tuple[int, ...], target: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_targets(resolve(name), shape, target, "m07")


@pytest.mark.parametrize(
    ("name", "shape", "target"),
    [
        ("cross_entropy", (1, 3), np.array([0, 2, -100])),
        ("cross_entropy", (1, 3), np.full((5, 3), 1 / 3)),
        ("mse", (1, 2), torch.full((4, 2), 1e9)),
        ("bce", (1, 1), np.array([[0], [1]])),
        ("soft_margin", (1,), np.array([1, -1])),
    ],
)
def test_good_targets_pass(name: str, shape: tuple[int, ...], target: Any) -> None:
    check_targets(resolve(name), shape, target, None)


def test_targets_of_an_own_loss_are_its_own_affair() -> None:
    check_targets(resolve(lambda output, target: output.sum()), (1, 3), ["anything"], None)

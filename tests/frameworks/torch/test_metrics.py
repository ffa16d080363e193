import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, r2_score, top_k_accuracy_score
from torch import Tensor
from torch.func import vmap

from modelfleet.errors import InputError
from modelfleet.frameworks.torch.metrics import Metric, resolve


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def one(metric: Any) -> Metric:
    (found,) = resolve([metric])
    return found


def array(tensor: Tensor) -> Any:
    """For scikit-learn, whose annotations know no tensors."""
    return tensor.numpy()


def over_batches(metric: Metric, output: Tensor, target: Tensor, sizes: list[int]) -> float:
    """The metric over uneven batches, each padded with rows of weight 0 to the length of the longest."""
    total: dict[str, float] = {}
    start, longest = 0, max(sizes)
    for size in sizes:
        rows = torch.arange(start, start + longest).clamp(max=len(output) - 1)
        weights = (torch.arange(longest) < size).float()
        for name, value in metric.sums(output[rows], target[rows], weights).items():
            assert value.shape == ()
            total[name] = total.get(name, 0.0) + value.item()
        start += size
    assert start == len(output)
    return metric.value(total)


SIZES = [8, 8, 3, 1]


def test_accuracy_of_class_indices_and_one_hot_targets() -> None:
    output, target = torch.randn(20, 4), torch.randint(4, (20,))
    expected = accuracy_score(array(target), array(output.argmax(1)))
    assert over_batches(one("accuracy"), output, target, SIZES) == pytest.approx(expected)
    one_hot = torch.nn.functional.one_hot(target, 4)
    assert over_batches(one("accuracy"), output, one_hot, SIZES) == pytest.approx(expected)
    assert over_batches(one("accuracy"), output, one_hot * 0.7 + 0.1, SIZES) == pytest.approx(expected)


@pytest.mark.parametrize("output_shape", [(20,), (20, 1)])
@pytest.mark.parametrize("target_shape", [(20,), (20, 1)])
def test_accuracy_of_one_logit(output_shape: tuple[int, ...], target_shape: tuple[int, ...]) -> None:
    output, target = torch.randn(20), torch.randint(2, (20,))
    expected = accuracy_score(array(target), array(output > 0))
    for labels in (target, target.float(), target.bool(), target * 2 - 1):
        shaped = output.reshape(output_shape), labels.reshape(target_shape).float()
        assert over_batches(one("accuracy"), *shaped, SIZES) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["accuracy", "top_2"])
@pytest.mark.parametrize("classes_last", [False, True])
def test_sequences_count_every_label_that_is_not_ignored(name: str, classes_last: bool) -> None:
    output, target = torch.randn(20, 5, 3), torch.randint(5, (20, 3))
    target[::4, 1] = -100
    flat, labels = output.movedim(1, 2).reshape(-1, 5), target.reshape(-1)
    flat, labels = flat[labels >= 0], labels[labels >= 0]
    k = 1 if name == "accuracy" else 2
    expected = top_k_accuracy_score(array(labels), array(flat), k=k, labels=array(torch.arange(5)))
    given = output.movedim(1, 2) if classes_last else output
    assert over_batches(one(name), given, target, SIZES) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_top_k(k: int) -> None:
    output, target = torch.randn(20, 6), torch.randint(6, (20,))
    expected = top_k_accuracy_score(array(target), array(output), k=k, labels=array(torch.arange(6)))
    assert over_batches(one(f"top_{k}"), output, target, SIZES) == pytest.approx(expected)


def test_top_k_of_equal_and_broken_scores() -> None:
    weights, target = torch.ones(4), torch.tensor([0, 1, 2, 3])
    equal = one("top_2").sums(torch.zeros(4, 4), target, weights)
    broken = one("top_2").sums(torch.full((4, 4), math.nan), target, weights)
    assert (equal["total"], broken["total"]) == (2, 0)


def test_top_k_needs_k_classes() -> None:
    with pytest.raises(InputError, match="top_5 needs at least 5 classes, but the model gives 3"):
        one("top_5").sums(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.ones(4))


@pytest.mark.parametrize("shape", [(20,), (20, 1), (20, 3)])
def test_regression_metrics(shape: tuple[int, ...]) -> None:
    output, target = torch.randn(shape), torch.randn(shape)
    difference = (output - target).double()
    assert over_batches(one("mse"), output, target, SIZES) == pytest.approx((difference**2).mean())
    assert over_batches(one("mae"), output, target, SIZES) == pytest.approx(difference.abs().mean())
    assert over_batches(one("r2"), output, target, SIZES) == pytest.approx(r2_score(array(target), array(output)))


def test_r2_is_accurate_far_from_zero() -> None:
    target = 1e5 + torch.randn(20)
    output = target + 0.1 * torch.randn(20)
    expected = r2_score(array(target.double()), array(output.double()))
    assert expected > 0.9
    assert over_batches(one("r2"), output, target, SIZES) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_r2_of_a_constant_target(offset: float) -> None:
    target = torch.full((20,), 0.1)
    expected = r2_score(array(target), array(target + offset))
    assert over_batches(one("r2"), target + offset, target, SIZES) == expected


@pytest.mark.parametrize("name", ["accuracy", "mse", "mae", "r2", "top_1"])
def test_no_rows_give_nan(name: str) -> None:
    target = torch.zeros(2) if name in ("mse", "mae", "r2") else torch.zeros(2, dtype=torch.int64)
    output = torch.zeros(2) if name in ("mse", "mae", "r2") else torch.zeros(2, 3)
    sums = one(name).sums(output, target, torch.zeros(2))
    assert math.isnan(one(name).value({key: value.item() for key, value in sums.items()}))


@pytest.mark.parametrize("name", ["accuracy", "top_2"])
def test_class_metrics_under_vmap(name: str) -> None:
    output, target = torch.randn(3, 8, 4), torch.randint(4, (3, 8))
    weights = (torch.rand(3, 8) > 0.3).float()
    check_vmap(one(name), output, target, weights)


@pytest.mark.parametrize("name", ["mse", "mae", "r2"])
def test_value_metrics_under_vmap(name: str) -> None:
    weights = (torch.rand(3, 8) > 0.3).float()
    check_vmap(one(name), torch.randn(3, 8, 2), torch.randn(3, 8, 2), weights)


def check_vmap(metric: Metric, output: Tensor, target: Tensor, weights: Tensor) -> None:
    together = vmap(metric.sums)(output, target, weights)
    for member in range(len(output)):
        alone = metric.sums(output[member], target[member], weights[member])
        assert alone.keys() == together.keys()
        for name, value in alone.items():
            torch.testing.assert_close(together[name][member], value)


def worst(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().max()


def test_a_function_is_averaged_over_batches_by_their_rows() -> None:
    metric = one(worst)
    assert (metric.name, metric.can_mask_rows) == ("worst", False)
    output, target = torch.randn(5, 1), torch.randn(5, 1)
    parts = [(output[:4], target[:4]), (output[4:], target[4:])]
    batches = [metric.sums(o, t, torch.ones(len(o))) for o, t in parts]
    total = {name: np.float64(batches[0][name] + batches[1][name]) for name in batches[0]}
    expected = (4 * worst(*parts[0]) + worst(*parts[1])) / 5
    assert metric.value(total) == pytest.approx(expected.item())
    check_vmap(metric, torch.randn(3, 4), torch.randn(3, 4), torch.ones(3, 4))


def test_a_function_may_give_a_plain_number_but_not_many() -> None:
    metric = one({"seven": lambda output, target: 7})
    assert metric.sums(torch.ones(3), torch.ones(3), torch.ones(3))["total"] == 21
    with pytest.raises(InputError, match=r"the metric 'many' gave \(3,\)"):
        one({"many": lambda output, target: output}).sums(torch.ones(3), torch.ones(3), torch.ones(3))


def test_metrics_keep_their_order_and_one_may_stand_alone() -> None:
    found = resolve(["top_3", worst, {"a": worst, "b": worst}, "accuracy"])
    assert [metric.name for metric in found] == ["top_3", "worst", "a", "b", "accuracy"]
    alone: list[Any] = ["accuracy", worst, {"worst": worst}]
    assert [resolve(metric)[0].name for metric in alone] == ["accuracy", "worst", "worst"]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (["acuracy"], "unknown metric 'acuracy'. Did you mean 'accuracy'?"),
        (["top_0"], "unknown metric 'top_0'"),
        (["mse", "mse"], "two metrics named 'mse'"),
        ([worst, {"worst": worst}], "two metrics named 'worst'"),
        ([{"loss": worst}], "two metrics named 'loss'"),
        ([3], "the metric 'int' is a int"),
    ],
)
def test_what_is_no_metric_is_refused(metrics: list[Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve(metrics)


@pytest.mark.parametrize(
    ("name", "output", "target", "words"),
    [
        ("accuracy", torch.zeros(4, 3), torch.zeros(4, 1), r"an output \(4, 3\) with a target \(4, 1\)"),
        ("accuracy", torch.zeros(4), torch.zeros(4, 3), r"an output \(4,\) with a target \(4, 3\)"),
        ("top_1", torch.zeros(4), torch.zeros(4), r"an output \(4,\) with a target \(4,\)"),
        ("r2", torch.zeros(4, 1), torch.zeros(4), r"Reshape the target to \(row, 1\)"),
        ("mse", torch.zeros(4, 1), torch.zeros(4), r"Reshape the target to \(row, 1\)"),
        ("accuracy", {"a": 1}, torch.zeros(4), "gives a dict, but accuracy needs a tensor"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, output: Any, target: Tensor, words: str) -> None:
    with pytest.raises(InputError, match=words):
        one(name).sums(output, target, torch.ones(4))


@pytest.mark.parametrize("name", ["accuracy", "mse", "r2"])
def test_sums_are_wide_enough_to_count_an_epoch(name: str) -> None:
    sums = one(name).sums(torch.zeros(2), torch.zeros(2), torch.ones(2))
    assert {value.dtype for value in sums.values()} == {torch.float64}

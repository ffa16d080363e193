"""JAX's losses and metrics give torch's numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from modelfleet.errors import InputError
from modelfleet.frameworks.jax import losses, metrics
from modelfleet.frameworks.jax.target_checks import check_targets
from modelfleet.frameworks.target_checks import IGNORED
from modelfleet.frameworks.torch import losses as torch_losses
from modelfleet.frameworks.torch import metrics as torch_metrics

ROWS, CLASSES = 7, 4


def case(name: str) -> tuple[np.ndarray, np.ndarray]:
    """An output and a target that the loss can take."""
    generator = np.random.default_rng(0)
    output = 2 * generator.normal(size=(ROWS, CLASSES)).astype(np.float32)
    kind = losses.LOSSES[name].kind
    if kind.startswith("classes"):
        target = generator.integers(0, CLASSES, ROWS)
        if name != "multi_margin":
            target[2] = IGNORED
        return output, target.astype(np.int32)
    target = generator.uniform(size=output.shape).astype(np.float32)
    if kind == "signs":
        target = np.where(target > 0.5, 1, -1).astype(np.float32)
    if name == "bce":
        output = generator.uniform(size=output.shape).astype(np.float32)
        output[0, 0] = 0
    return output, target


def numbers(function: Any, output: np.ndarray) -> tuple[float, np.ndarray]:
    """A loss and its gradient by JAX."""
    loss, gradient = jax.value_and_grad(function)(jnp.asarray(output))
    return float(loss), np.asarray(gradient)


@pytest.mark.parametrize("name", losses.LOSSES)
@pytest.mark.parametrize("masked", [False, True])
def test_named_losses_are_torchs(name: str, masked: bool) -> None:
    output, target = case(name)
    weights = (np.arange(ROWS) < ROWS - 2).astype(np.float32) if masked else None
    ours, gradient = numbers(
        lambda o: losses.weighted(losses.LOSSES[name], o, jnp.asarray(target), weights), output
    )
    theirs = torch.from_numpy(output).requires_grad_()
    kept = slice(None, ROWS - 2 if masked else None)
    label = torch.from_numpy(target)
    loss = torch_losses.LOSSES[name].plain(theirs[kept], label[kept])
    loss.backward()
    assert ours == pytest.approx(loss.item(), rel=1e-5)
    assert theirs.grad is not None
    np.testing.assert_allclose(gradient, theirs.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_probabilities_are_targets_too_and_classes_are_on_the_last_axis() -> None:
    output, _ = case("cross_entropy")
    target = np.full((ROWS, CLASSES), 0.25, np.float32)
    ours = losses.weighted(losses.LOSSES["cross_entropy"], jnp.asarray(output), target, None)
    theirs = torch.nn.functional.cross_entropy(torch.from_numpy(output), torch.from_numpy(target))
    assert float(ours) == pytest.approx(theirs.item(), rel=1e-6)
    sequence = jnp.stack([output, output], axis=1)  # (row, position, class)
    labels = np.zeros((ROWS, 2), np.int32)
    long = losses.weighted(losses.LOSSES["cross_entropy"], sequence, labels, None)
    short = losses.weighted(losses.LOSSES["cross_entropy"], jnp.asarray(output), labels[:, 0], None)
    assert float(long) == pytest.approx(float(short), rel=1e-6)


def test_a_loss_of_ones_own_may_tell_its_mean_or_its_rows() -> None:
    output, target = case("mse")
    by_row = losses.resolve(lambda o, y: ((o - y) ** 2).mean(1))
    mean = losses.resolve(lambda o, y: ((o - y) ** 2).mean())
    assert mean.rows(jnp.asarray(output), target)[1] is None
    for loss in (by_row, mean):
        ours = losses.weighted(loss, jnp.asarray(output), target, None)
        assert float(ours) == pytest.approx(float(np.mean((output - target) ** 2)), rel=1e-6)
    weights = np.array([1, 1, 0, 0, 0, 0, 0], np.float32)
    masked = losses.weighted(by_row, jnp.asarray(output), target, weights)
    assert float(masked) == pytest.approx(float(np.mean((output[:2] - target[:2]) ** 2)), rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "target", "message"),
    [
        ("cross_entropy", np.full(ROWS, CLASSES), "the target in row 0 is 4, but the model gives 4 classes"),
        ("cross_entropy", np.zeros(ROWS), "class indices as float64. Pass them as integers"),
        ("cross_entropy", np.zeros((ROWS, 2), int), r"needs class indices of shape \(row,\), or floating-point"),
        ("mse", np.zeros(ROWS), r"the output is \(7, 4\), but the target is \(7,\); mse needs both of one shape"),
        ("bce_with_logits", np.full((ROWS, CLASSES), 2.0), "takes 0 to 1"),
        ("mse", np.array(["a"] * ROWS), "the target is of <U1; mse needs numbers"),
    ],
)
def test_targets_that_do_not_fit_are_refused(loss: str, target: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_targets(losses.resolve(loss), (2, CLASSES), target, "a")


def test_unknown_losses_are_refused() -> None:
    with pytest.raises(InputError, match="Did you mean 'cross_entropy'"):
        losses.resolve("crossentropy")
    with pytest.raises(InputError, match="the loss is a int"):
        losses.resolve(3)


def _ours(name: Any, batches: list[Any]) -> float:
    (metric,) = metrics.resolve([name])
    total = None
    for output, target, weights in batches:
        parts = metric.parts(jnp.asarray(output), jnp.asarray(target), jnp.asarray(weights))
        total = metric.joined(metric.begun(parts) if total is None else total, parts)
    assert total is not None
    return float(metric.value(total))


def _theirs(name: Any, batches: list[Any]) -> float:
    (metric,) = torch_metrics.resolve([name])
    total: dict[str, Any] = {}
    for arrays in batches:
        for key, value in metric.sums(*map(torch.from_numpy, arrays)).items():
            total[key] = total.get(key, 0) + value
    return metric.value(total)


@pytest.mark.parametrize("name", ["accuracy", "top_2", "mse", "mae", "r2"])
def test_metrics_are_torchs(name: str) -> None:
    generator = np.random.default_rng(1)
    batches = []
    for rows in (5, 8):
        output = generator.normal(size=(rows, CLASSES)).astype(np.float32) + 3
        if name in ("accuracy", "top_2"):
            target = generator.integers(0, CLASSES, rows)
            target[0] = IGNORED
        else:
            target = generator.normal(size=(rows, CLASSES)).astype(np.float32) + 3
        weights = (np.arange(rows) < rows - 2).astype(np.float32)
        batches.append((output, target, weights))
    assert _ours(name, batches) == pytest.approx(_theirs(name, batches), rel=1e-5)


def test_a_logit_per_row_has_an_accuracy() -> None:
    output = np.array([[1.0], [-1.0], [2.0]], np.float32)
    weights = np.ones(3, np.float32)
    assert _ours("accuracy", [(output, np.array([1, 0, 0]), weights)]) == pytest.approx(2 / 3)
    assert _ours("accuracy", [(output[:, 0], np.array([[1], [0], [0]]), weights)]) == pytest.approx(2 / 3)


def test_sums_count_beyond_what_float32_can() -> None:
    sums = jnp.asarray([2.0**24, 0.0], jnp.float32)
    add = jax.jit(metrics.added)
    for _ in range(5):
        sums = add(sums, jnp.float32(1))
    assert float(sums[0]) == 2.0**24  # float32 has no room for one more
    assert np.asarray(sums, np.float64).sum() == 2**24 + 5


def test_r2_is_right_far_from_zero() -> None:
    generator = np.random.default_rng(2)
    target = (1000 + generator.normal(size=(64, 1))).astype(np.float32)
    output = target + generator.normal(size=(64, 1)).astype(np.float32) / 2
    batches = [(output[s], target[s], np.ones(32, np.float32)) for s in (slice(32), slice(32, 64))]
    assert _ours("r2", batches) == pytest.approx(_theirs("r2", batches), rel=1e-4)
    same = np.full((8, 1), 5, np.float32)
    assert _ours("r2", [(same, same, np.ones(8, np.float32))]) == 1
    assert _ours("r2", [(same + 1, same, np.ones(8, np.float32))]) == 0


def test_metrics_of_ones_own_and_their_names() -> None:
    output, target = np.ones((4, 1), np.float32), np.zeros((4, 1), np.float32)
    weights = np.ones(4, np.float32)
    assert _ours({"gap": lambda o, y: (o - y).mean()}, [(output, target, weights)]) == 1
    with pytest.raises(InputError, match="two metrics named 'mse'"):
        metrics.resolve(["mse", "mse"])
    with pytest.raises(InputError, match=r"unknown metric 'acuracy'\. Did you mean 'accuracy'"):
        metrics.resolve("acuracy")
    with pytest.raises(InputError, match="expected one number for the batch"):
        _ours(lambda o, y: o - y, [(output, target, weights)])

"""Sample weights: the loss of a batch is the mean of w_i * loss_i, as in a loop written by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import all_weights, close, equal, fit, fleet_of, mlp, toy
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.frameworks.torch import losses
from modelfleet.frameworks.torch.task import Task
from modelfleet.types import LossLike, Strategy

ROWS, BATCH = 21, 8  # the last batch is short
X, Y = (torch.from_numpy(part) for part in toy(ROWS))
X = X.double()
W = torch.linspace(0, 3, ROWS, dtype=torch.float64)
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-12}

LOSSES: dict[str, tuple[Any, Tensor]] = {
    "cross_entropy": (F.cross_entropy, Y),
    "mse": (F.mse_loss, X[:, :3].clone()),
    "bce_with_logits": (F.binary_cross_entropy_with_logits, (X[:, :3] > 0).double()),
}


def doubles(members: int, loss: LossLike, normed: bool = False) -> mf.Fleet:
    models = []
    for seed in range(members):
        torch.manual_seed(seed)
        first = nn.Linear(4, 5, bias=False)  # BatchNorm takes a bias away, and Adam would scale up its rounding
        model = nn.Sequential(first, nn.BatchNorm1d(5), nn.Linear(5, 3)) if normed else mlp()
        models.append(model.double())
    fleet = mf.Fleet(models)
    fleet.compile("adam", loss, lr=0.01)
    return fleet


def by_hand(model: nn.Module, function: Any, x: Tensor, y: Tensor, w: Tensor, epochs: int) -> list[float]:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(epochs):
        total = 0.0
        for low in range(0, len(x), BATCH):
            rows = slice(low, low + BATCH)
            values = function(model(x[rows]), y[rows], reduction="none").flatten(1 if y.dim() > 1 else 0)
            loss = (values * (w[rows, None] if values.dim() > 1 else w[rows])).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x[rows])
        losses.append(total / len(x))
    return losses


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_a_fleet_weighs_rows_as_a_loop_by_hand(strategy: Strategy, loss: str) -> None:
    function, y = LOSSES[loss]
    fleet, alone = doubles(2, loss), doubles(2, loss)
    own = {"0": W, "1": W.flip(0)}
    history = fit(
        fleet,
        (X, y),
        sample_weight=mf.each(own),
        batch_size=BATCH,
        shuffle=False,
        epochs=2,
        strategy=strategy,
    )
    for name, weights in own.items():
        losses = by_hand(alone[name], function, X, y, weights, 2)
        np.testing.assert_allclose(history[name]["loss"], losses, **CLOSE)
        for found, expected in zip(fleet[name].parameters(), alone[name].parameters(), strict=True):
            np.testing.assert_allclose(found.detach(), expected.detach(), **CLOSE)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("strategy", ["fused", "threads"])
def test_members_with_unlike_numbers_of_rows(strategy: Strategy, normed: bool) -> None:
    lengths = {"0": ROWS, "1": 13, "2": 5}
    fleet, alone = doubles(3, "cross_entropy", normed), doubles(3, "cross_entropy", normed)
    data = mf.each({name: (X[:rows], Y[:rows]) for name, rows in lengths.items()})
    weights = mf.each({name: W[-rows:] for name, rows in lengths.items()})
    fit(fleet, data, sample_weight=weights, batch_size=BATCH, shuffle=False, epochs=2, strategy=strategy)
    for name, rows in lengths.items():
        by_hand(alone[name], F.cross_entropy, X[:rows], Y[:rows], W[-rows:], 2)
        for found, expected in zip(fleet[name].parameters(), alone[name].parameters(), strict=True):
            np.testing.assert_allclose(found.detach(), expected.detach(), **CLOSE)


def test_shuffles_keep_a_row_and_its_weight_together() -> None:
    # Without a bias, a weight on a squared error is its root on the input and the target.
    def fleet() -> mf.Fleet:
        torch.manual_seed(0)
        found = mf.Fleet([nn.Linear(4, 2, bias=False).double() for _ in range(2)])
        found.compile("sgd", "mse", lr=0.05)
        return found

    y, root = X[:, :2].clone(), W.sqrt()[:, None]
    weighted, scaled = fleet(), fleet()
    for model, other in zip(weighted.names, scaled.names, strict=True):
        scaled[other].load_state_dict(weighted[model].state_dict())
    fit(weighted, (X, y), sample_weight=W, batch_size=BATCH, epochs=3)
    fit(scaled, (root * X, root * y), batch_size=BATCH, epochs=3)
    for name in weighted.names:
        np.testing.assert_allclose(weighted[name].weight.detach(), scaled[name].weight.detach(), **CLOSE)


def test_equal_weights_change_nothing_and_ignored_labels_do_not_count() -> None:
    labels = Y.clone()
    labels[::4] = -100
    fleet, other = doubles(2, "cross_entropy"), doubles(2, "cross_entropy")
    fit(fleet, (X, labels), sample_weight=np.ones(ROWS, dtype=int), batch_size=BATCH, epochs=2)
    fit(other, (X, labels), batch_size=BATCH, epochs=2)
    for name in fleet.names:
        for found, expected in zip(fleet[name].parameters(), other[name].parameters(), strict=True):
            np.testing.assert_allclose(found.detach(), expected.detach(), **CLOSE)


def test_a_loader_gives_weights_in_its_batches_and_validation_has_its_own() -> None:
    options: dict[str, Any] = {"shuffle": False, "epochs": 2}
    given, read = doubles(2, "cross_entropy"), doubles(2, "cross_entropy")
    fit(given, (X, Y), sample_weight=W, batch_size=BATCH, **options)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y, W), batch_size=BATCH)
    history = fit(read, loader, validation=(X, Y), **options)
    assert equal(all_weights(given), all_weights(read))
    assert read.evaluate((X, Y))["1"]["loss"] == pytest.approx(history["1"]["val_loss"][-1])
    weighted = read.evaluate((X, Y, W), batch_size=ROWS)["1"]["loss"]
    expected = (F.cross_entropy(read["1"](X), Y, reduction="none") * W).mean().item()
    assert weighted == pytest.approx(expected, abs=1e-12)


def test_a_validation_split_takes_the_weights_along() -> None:
    split, given = doubles(2, "cross_entropy"), doubles(2, "cross_entropy")
    history = fit(split, (X, Y), sample_weight=W, validation_split=0.25)
    expected = fit(given, (X[:15], Y[:15], W[:15]), validation=(X[15:], Y[15:], W[15:]))
    assert history["1"] == expected["1"]


def test_weights_are_not_taken_for_padding_that_an_earlier_fit_had() -> None:
    # Both are an array of floats beside (x, y), and the traced step of one must not be used for the other.
    fleet, other = fleet_of(2), fleet_of(2)
    x, own = X.float(), mf.each([W.float(), W.flip(0).float()])
    fit(fleet, mf.each([(x, Y), (x[:13], Y[:13])]), batch_size=BATCH, strategy="fused")
    for name in fleet.names:
        other[name].load_state_dict(fleet[name].state_dict())
    fit(other, (x, Y), sample_weight=own, batch_size=BATCH, shuffle=False, strategy="interleaved")
    fit(fleet, (x, Y), sample_weight=own, batch_size=BATCH, shuffle=False, strategy="fused")
    for name in fleet.names:
        assert close(fleet[name].state_dict(), other[name].state_dict())


def test_an_objective_gets_the_weights_in_its_batch() -> None:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        x, y, w = batch
        return (F.cross_entropy(model(x), y, reduction="none") * w).mean()

    fleet, named = doubles(2, "cross_entropy"), doubles(2, "cross_entropy")
    fleet.compile("adam", objective=objective, lr=0.01)
    fit(fleet, (X, Y, W), batch_size=BATCH)
    fit(named, (X, Y), sample_weight=W, batch_size=BATCH)
    for name in fleet.names:
        np.testing.assert_allclose(fleet[name][0].weight.detach(), named[name][0].weight.detach(), **CLOSE)


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("weight", "told"),
    [
        (W[:5], "sample_weight has 5 rows, but data has 21"),
        (-W, r"row 1 is -0.15.*0 or more"),
        (W / 0, r"row 0 is nan"),
        (W[:, None], r"one floating-point number for every row, and this one is \(21, 1\)"),
        (2.0, "sample_weight: the array is of type float"),
        ({"0": W, "1": W}, "mf.each"),
        (mf.each([W, -W]), "member '1': sample_weight in row 1"),
        (mf.each([W, W[:5]]), "sample_weight of member '1' has 5 rows"),
    ],
)
def test_bad_weights_are_refused_before_the_first_step(weight: Any, told: str) -> None:
    fleet = fleet_of(2)
    before = all_weights(fleet)
    with pytest.raises(mf.InputError, match=told):
        fit(fleet, (X.float(), Y), sample_weight=weight)
    assert equal(all_weights(fleet), before)


@pytest.mark.parametrize(
    ("recipe", "data", "told"),
    [
        (
            {"loss": own_loss},
            (X.float(), Y),
            "'own_loss' returns one number for the batch",
        ),
        ({"loss": None, "objective": lambda m, b: m(b[0]).sum()}, (X.float(), Y), r"fit\(\(x, y, w\)\)"),
        ({}, [(X.float(), Y)], "data is a loader. Let it yield"),
        ({}, (X.float(), Y, W), r"needs data \(x, y\), and data is a tuple of 3"),
    ],
)
@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_what_can_not_be_weighed_is_refused(strategy: Strategy, recipe: Any, data: Any, told: str) -> None:
    with pytest.raises(mf.InputError, match=told):
        fit(fleet_of(2, **recipe), data, sample_weight=W, strategy=strategy)


def per_row(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (per_row, r"'per_row' returns \(21,\) for the batch"),
        (nn.CrossEntropyLoss(reduction="none"), r"returns \(21,\) for the batch.*reduction='mean'"),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), "divides by the sum of the classes"),
    ],
)
@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_a_loss_that_has_no_mean_over_rows_says_so(strategy: Strategy, loss: Any, told: str) -> None:
    with pytest.raises(mf.InputError, match=told):
        fit(fleet_of(2, loss=loss), (X.float(), Y), sample_weight=W, strategy=strategy, batch_size=21)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.2), Y),
        (nn.CrossEntropyLoss(ignore_index=1), Y),
        (nn.HuberLoss(delta=0.3), X[:, :3]),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]).double()), (X[:, :3] > 0).double()),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_losses_of_torch_with_options_weigh_rows(strategy: Strategy, loss: Any, target: Tensor) -> None:
    """Rows that count twice give the loss of rows that are there twice, and ones change nothing."""
    twice = torch.arange(ROWS) % 2 + 1

    def trained(rows: Any, weights: Any) -> mf.Fleet:
        fleet = doubles(2, loss)
        fit(fleet, rows, sample_weight=weights, batch_size=2 * ROWS, shuffle=False, strategy=strategy)
        return fleet

    once, ones = trained((X, target), None), trained((X, target), torch.ones(ROWS))
    for name in once.names:
        np.testing.assert_allclose(once[name][0].weight.detach(), ones[name][0].weight.detach(), **CLOSE)

    model = doubles(1, loss)["0"]
    found = losses.by_row(losses.resolve(loss), model(X), target, twice)
    sums, counts = found[0].detach(), found[1]
    repeated = loss(*(part.repeat_interleave(twice, 0) for part in (model(X), target)))
    all_counts = (counts * twice).sum()
    np.testing.assert_allclose(float(sums.sum() / all_counts), repeated.item(), **CLOSE)


def test_whole_numbers_in_the_data_could_be_labels_and_are_told_how_to_be_weights() -> None:
    counts = torch.arange(ROWS) % 3
    with pytest.raises(mf.InputError, match=r"int64.*could be labels.*sample_weight=w"):
        fit(fleet_of(2), (X.float(), Y, counts))
    fit(fleet_of(2), (X.float(), Y), sample_weight=counts)


def test_rows_on_several_devices_add_up_to_the_whole_batch() -> None:
    optimizer: Any = None  # nothing is updated
    task = Task(optimizer, losses.resolve("cross_entropy"))
    model, batch = mlp().double(), (X, Y, W)
    with torch.no_grad():
        whole, _ = task.run(model, batch, None)
        shares = [
            task.partial_loss(model, (X[rows], Y[rows], W[rows]), None, torch.tensor(0.5))
            for rows in (slice(7), slice(7, None))
        ]
    total, count = sum(share[0] for share in shares), sum(share[1] for share in shares)
    np.testing.assert_allclose(float(total / count), whole.item(), **CLOSE)


def test_processes_weigh_rows_too() -> None:
    fleet, here = doubles(2, "cross_entropy"), doubles(2, "cross_entropy")
    fit(here, (X, Y), sample_weight=W, batch_size=BATCH)
    fit(fleet, (X, Y), sample_weight=W, batch_size=BATCH, strategy="processes")
    for name in fleet.names:
        np.testing.assert_allclose(fleet[name][0].weight.detach(), here[name][0].weight.detach(), **CLOSE)


# --- JAX ---------------------------------------------------------------------------------------------------------


def apply(params: Any, x: Any) -> Any:
    return x @ params["w"] + params["b"]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_jax_weighs_rows_as_torch_does(strategy: Strategy, own: bool) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("optax")

    def by_row(output: Any, target: Any) -> Any:
        return ((output - target) ** 2).mean(-1)

    torch.manual_seed(0)
    layers = [nn.Linear(4, 2) for _ in range(2)]
    pairs = [
        ({"w": layer.weight.detach().numpy().T.copy(), "b": layer.bias.detach().numpy().copy()}, apply)
        for layer in layers
    ]
    x, lengths = X.float().numpy(), (ROWS, 13)
    data = mf.each([(x[:rows], x[:rows, :2]) for rows in lengths])
    weights = mf.each([W[:rows].numpy() for rows in lengths])
    found, expected = mf.Fleet(pairs), mf.Fleet(layers)
    found.compile("sgd", by_row if own else "mse", lr=0.05)
    expected.compile("sgd", "mse", lr=0.05)
    for fleet in (found, expected):
        fit(fleet, data, sample_weight=weights, batch_size=BATCH, shuffle=False, epochs=2, strategy=strategy)
    for name, layer in zip(found.names, layers, strict=True):
        np.testing.assert_allclose(found[name][0]["w"].T, layer.weight.detach(), rtol=0, atol=1e-6)
    if own:
        found.compile("sgd", lambda output, target: by_row(output, target).mean(), lr=0.05)
        with pytest.raises(mf.InputError, match="one number for the batch"):
            fit(found, data, sample_weight=weights)
    with pytest.raises(mf.InputError, match="member '1': sample_weight in row 0"):
        fit(found, data, sample_weight=mf.each([W.numpy(), np.full(13, np.nan)]))

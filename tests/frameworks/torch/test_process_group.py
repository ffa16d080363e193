"""One lane over two processes: the same numbers as on one device with the whole batch."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import all_weights, fit, mlp, toy
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.frameworks import torch as adapter
from modelfleet.frameworks.torch.parallel.process_group import ProcessGroup, RankLostError
from modelfleet.types import Strategy

RANKS = 2
Result = dict[str, Any]


def outcome(fleet: mf.Fleet, data: Any, strategy: Strategy = "fused", **options: Any) -> Result:
    """Two epochs of a fleet: its weights, its history, and who failed."""
    history = fit(fleet, data, epochs=2, strategy=strategy, **options)
    return {
        "weights": all_weights(fleet),
        "history": {name: history[name] for name in fleet.names},
        "failed": {name: str(failure) for name, failure in history.failed.items()},
    }


def build(
    members: int = 1, factory: Callable[[], nn.Module] = mlp, double: bool = False, **recipe: Any
) -> mf.Fleet:
    """A compiled fleet, the same in every process."""
    fleet = mf.Fleet.build(factory, members, seed=3)
    for name in fleet.names if double else ():
        fleet[name].double()
    whole: dict[str, Any] = {"optimizer": "sgd", "loss": "cross_entropy", "lr": 0.1, **recipe}
    fleet.compile(**whole)
    return fleet


def with_dropout() -> nn.Module:
    return mlp(dropout=0.4)


def with_attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 4), layer, nn.Flatten(), nn.Linear(8, 3))


class Recurrent(nn.Module):
    """Recurrent layers with dropout between them: the mask's second axis has the rows, its first the time."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.layers = kind(1, 4, num_layers=2, dropout=0.4, batch_first=batch_first)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = x[:, :2, None] if self.batch_first else x[:, :2].t().unsqueeze(2)
        output, _ = self.layers(steps)
        return self.head(output[:, -1] if self.batch_first else output[-1])


class Noise(nn.Module):
    """A layer with noise in its input."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + self.draw(x)))


def by_row(x: Tensor) -> Tensor:
    """Has the rows in any axis, several numbers for each, or one draw for all: as many as a rank has rows."""
    several = torch.randn(len(x) * 4).view(len(x), 4)
    return torch.rand(4) + torch.randn(4, len(x)).t() + torch.randn(2, len(x), 4).sum(0) + several


def rare(x: Tensor) -> Tensor:
    """Drops next to nothing, and flattens the rows into the faster axis."""
    return nn.functional.dropout(torch.ones(4 * len(x)), 0.001).view(4, len(x)).t()


def pairwise(x: Tensor) -> Tensor:
    return torch.randn(len(x), len(x)).mean(1, keepdim=True)


def as_often_as_rows(x: Tensor) -> Tensor:
    return torch.stack([torch.rand(4) for _ in x])


class Halfway(nn.Module):
    """Its second layer takes those rows whose first number is positive, if there are any: it can't be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, chosen = self.always(x), x[:, 0] > 0
        return y.index_put((chosen,), self.sometimes(y[chosen])) if chosen.any() else y


def doubled(data: Any) -> Any:
    return torch.from_numpy(data[0]).double(), torch.from_numpy(data[1])


def dropout() -> Result:
    return outcome(build(factory=with_dropout, metrics=["accuracy"]), toy(14), batch_size=7)


def draws() -> list[Result]:
    return [
        outcome(build(2, partial(Recurrent, nn.LSTM, batch_first=True)), toy(8), batch_size=8),
        outcome(build(1, partial(Recurrent, nn.GRU, batch_first=False)), toy(8), "interleaved", batch_size=8),
        outcome(build(2, partial(Noise, by_row)), toy(11), batch_size=8),
    ]


def undrawn() -> list[str]:
    """What is said of draws that are no row's own."""
    return [refused(partial(Noise, draw)) for draw in (rare, pairwise, as_often_as_rows)]


def attention() -> Result:
    return outcome(build(factory=with_attention, double=True), doubled(toy(12)), batch_size=6)


def clipped() -> Result:
    fleet = build(double=True, optimizer="adamw", lr=0.01, weight_decay=0.1, clip_norm=0.05)
    return outcome(fleet, doubled(toy(24)), batch_size=8)


def uneven() -> Result:
    """Batches of 7 rows and 1: then the first rank has none."""
    return outcome(build(metrics=["accuracy"]), toy(8), batch_size=7)


def padded() -> Result:
    """Members with unlike numbers of rows: the second rank's rows are padding for some of them."""
    data = mf.each([toy(rows, seed=rows) for rows in (12, 3)])
    return outcome(build(2, with_dropout, metrics=["accuracy"]), data, batch_size=8)


def cut() -> Result:
    """A loss that is a function: padded rows can't be weighted out, and members step by their counts."""
    data = mf.each([toy(rows, seed=rows) for rows in (12, 3)])
    return outcome(build(2, loss=lambda output, y: nn.functional.cross_entropy(output, y)), data, batch_size=8)


def ignored() -> Result:
    """All labels of the second rank's rows are left out."""
    x, y = toy(8)
    y[4:] = -100
    return outcome(build(metrics=["accuracy"]), (x, y), batch_size=8, shuffle=False)


def objective() -> Result:
    def loss(model: nn.Module, batch: Any) -> Any:
        error = (model(batch[0]) ** 2).mean()
        return error, {"size": batch[0].abs().mean()}

    return outcome(build(loss=None, objective=loss), toy(14), batch_size=7)


def spoiled() -> Result:
    """The last row of the second member's first batch, on the second rank, is NaN."""
    sets = [toy(16, seed=seed) for seed in range(3)]
    sets[1][0][7] = math.nan
    return outcome(build(3), mf.each(sets), batch_size=8, shuffle=False)


def halves() -> Result:
    return outcome(build(precision="fp16", optimizer="adam", lr=0.01), toy(16), batch_size=8)


def untraced() -> Result:
    fleet = build(factory=Halfway, optimizer="adamw", weight_decay=0.5, lr=0.01)
    return outcome(fleet, toy(16), strategy="interleaved", batch_size=2)


def fewer_epochs() -> Result:
    """Two of three members end after an epoch: the third goes on in a narrower state."""
    fleet = build(3, metrics=["accuracy"])
    history = fit(fleet, toy(14), epochs=mf.each([1, 3, 1]), strategy="fused", batch_size=7)
    return {
        "weights": all_weights(fleet),
        "history": {name: history[name] for name in fleet.names},
        "failed": dict(history.failed),
    }


def refused(factory: Callable[[], nn.Module]) -> str:
    with pytest.raises(mf.StrategyError) as error:
        outcome(build(factory=factory), toy(16), batch_size=8)
    return str(error.value)


def batchnorm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def untracked() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3))


def frozen() -> nn.Module:
    model = batchnorm()
    model[1].eval()
    return model


def norms() -> list[str]:
    return [refused(batchnorm), refused(untracked)]


def frozen_norm() -> Result:
    return outcome(build(factory=frozen), toy(16), batch_size=8)


def lonely() -> str:
    """The second rank takes no step: what the first says of it."""
    if os.environ["RANK"] == "1":
        return ""
    with pytest.raises(RankLostError) as error:
        outcome(build(), toy(8), batch_size=8)
    return str(error.value)


# --- two processes, started once


@contextmanager
def spread(group: ProcessGroup) -> Iterator[None]:
    """Every engine that is made meanwhile computes this rank's rows."""

    def make(*args: Any, **options: Any) -> Any:
        engine = plain(*args, **options)
        engine.split_rows_over(group)
        return engine

    plain: Any = adapter.make_engine
    adapter.make_engine = make  # pyrefly: ignore
    try:
        yield
    finally:
        adapter.make_engine = plain


def _rank(pipe: Connection, rank: int, folder: str) -> None:
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    number = 0
    while (order := pipe.recv()) is not None:
        case, timeout = order
        number += 1
        group = ProcessGroup.join(f"file://{folder}/{number}", rank, RANKS, timeout)
        try:
            with spread(group):
                pipe.send((True, case()))
        except BaseException as error:
            pipe.send((False, repr(error)))
        finally:
            group.close()


Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A function that runs a case in both processes, and gives what came of it in each."""
    context = get_context("spawn")
    folder = str(tmp_path_factory.mktemp("group"))
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(theirs, rank, folder), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)

    def run(case: Callable[[], Any], timeout: float = 60.0) -> list[Any]:
        for pipe in pipes:
            pipe.send((case, timeout))
        told = [pipe.recv() for pipe in pipes]
        for fine, result in told:
            assert fine, result
        return [result for _, result in told]

    yield run
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()


def assert_close(left: Any, right: Any, tolerance: float) -> None:
    """Two trees of numbers are the same within rounding."""
    if isinstance(left, list) and left and isinstance(left[0], dict):
        for one, other in zip(left, right, strict=True):
            assert_close(one, other, tolerance)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_close(left[key], right[key], tolerance)
    elif isinstance(left, str):
        assert left == right
    else:
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=tolerance, atol=tolerance)


EXACT = [dropout, draws, uneven, padded, cut, ignored, objective, untraced, fewer_epochs, frozen_norm]


@pytest.mark.parametrize("case", EXACT)
def test_two_ranks_give_what_one_device_gives(ranks: Run, case: Callable[[], Result]) -> None:
    first, second = ranks(case)
    assert_close(first, second, 0)
    assert_close(first, case(), 1e-6)


@pytest.mark.parametrize("case", [attention, clipped])
def test_they_do_so_in_float64(ranks: Run, case: Callable[[], Result]) -> None:
    first, second = ranks(case)
    assert_close(first, second, 0)
    assert_close(first, case(), 1e-12)


def test_float16_scales_alike(ranks: Run) -> None:
    first, second = ranks(halves)
    assert_close(first, second, 0)
    assert_close(first, halves(), 2e-3)


def test_a_nan_in_one_ranks_rows_sets_only_that_member_aside(ranks: Run) -> None:
    first, second = ranks(spoiled)
    assert_close(first, second, 0)
    assert_close(first, spoiled(), 1e-6)
    assert list(first["failed"]) == ["1"]
    assert all(math.isfinite(loss) for loss in first["history"]["2"]["loss"])


def test_models_that_couple_rows_are_refused_with_what_to_do(ranks: Run) -> None:
    for tracked, untracked in ranks(norms):
        assert "'1.running_mean'" in tracked
        assert "LayerNorm" in tracked
        assert "depends on the other rows" in untracked


def test_models_whose_draws_are_no_rows_own_are_refused(ranks: Run) -> None:
    for flattened, pairs, often in ranks(undrawn):
        assert "random numbers for a row are not at the row's position. Draw the same" in flattened
        assert "(8, 8) for 8 rows, and (4, 4) for 4" in pairs
        assert "8 times for 8 rows, and 4 times for 4" in often


def test_who_was_waited_for_is_named_with_the_step(ranks: Run) -> None:
    told, _ = ranks(lonely, timeout=2.0)
    assert "rank 0 of 2 waited in step 1 for rank 1" in told


def test_rows_are_cut_evenly() -> None:
    for count in (0, 1, 5, 7, 8):
        cuts = [ProcessGroup(rank, 3, 1.0, torch.distributed.HashStore()).rows(count) for rank in range(3)]
        assert [row for start, end in cuts for row in range(start, end)] == list(range(count))
        assert max(end - start for start, end in cuts) - min(end - start for start, end in cuts) <= 1


def test_a_group_that_nobody_else_joins_says_who_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RankLostError, match="rank 0 of 2 waited to join for rank 1"):
        ProcessGroup.join(f"file://{tmp_path}/alone", 0, 2, 0.5)

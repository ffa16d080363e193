"""Members that are trained from nothing, by one fleet or by a plain torch loop, and must come out alike."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import modelfleet as mf
from benchmarks.checking import EXACT, LONGEST, TOLERANCE, accept
from benchmarks.nets import make_net
from benchmarks.peers import Round
from benchmarks.promises import NETS
from benchmarks.rows import MLP_64, ROWS, Dataset, datasets
from modelfleet import testing

BATCH, STEPS = 32, 50  # of an epoch of the jobs that are counted in steps
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
ROW_OF = {"mlp": "mlp-64", "cnn": "cnn", "lstm": "lstm", "transformer": "transformer"}


@dataclass(frozen=True)
class Job:
    """Classifiers to train. Every sequence has one value per member; `data` has one for all, or one each."""

    make: Callable[..., nn.Module]
    arguments: Mapping[str, Sequence[Any]]
    data: Sequence[Any]
    rates: Sequence[float]
    optimizers: Sequence[str]
    epochs: int
    batch: int = BATCH
    loop_epochs: int | None = None
    """Epochs of the plain loop, where further ones would only take as long again."""

    @property
    def steps(self) -> int:
        """The steps that each member takes."""
        return self.epochs * -(-len(self.data[0][0]) // self.batch)

    def data_of(self, member: int) -> Any:
        """The data of a member."""
        return self.data[member % len(self.data)]

    def of(self, members: Sequence[int]) -> "Job":
        """The same job for some of the members."""

        def some(values: Sequence[Any]) -> list[Any]:
            return [values[member] for member in members]

        return replace(
            self,
            arguments={name: some(values) for name, values in self.arguments.items()},
            data=self.data if len(self.data) == 1 else some(self.data),
            rates=some(self.rates),
            optimizers=some(self.optimizers),
        )

    def sample(self) -> list[int]:
        """Some members, far from each other."""
        return list(range(0, len(self.rates), max(1, len(self.rates) // 5)))


def build(job: Job, names: Sequence[str] | None = None) -> mf.Fleet:
    """The fleet of a job, compiled."""
    arguments: dict[str, Any] = {name: mf.each(list(values)) for name, values in job.arguments.items()}
    fleet = mf.Fleet.build(job.make, names or len(job.rates), seed=0, **arguments)
    optimizers: Any = mf.each(list(job.optimizers)) if len(set(job.optimizers)) > 1 else job.optimizers[0]
    fleet.compile(optimizers, "cross_entropy", lr=mf.each(list(job.rates)))
    return fleet


def train(job: Job) -> tuple[mf.Fleet, float]:
    """Build the fleet and fit it; with the mean of the members' last losses."""
    fleet = build(job)
    data = job.data[0] if len(job.data) == 1 else mf.each(list(job.data))
    history = fleet.fit(data, epochs=job.epochs, batch_size=job.batch, progress=False)
    if history.failed:
        raise RuntimeError(f"members failed: {history.failed}")
    losses = [history[name]["loss"][-1] for name in fleet.names]
    return fleet, sum(losses) / len(losses)


def by_fleet(job: Job) -> Round:
    """One fleet for all; then the check, which is not timed."""
    started = time.perf_counter()
    fleet, loss = train(job)
    seconds = time.perf_counter() - started
    notes = {"largest difference to alone": differences(job, fleet)}
    return Round(len(job.rates) * job.steps, loss, seconds, notes)


def differences(job: Job, fleet: mf.Fleet) -> float:
    """Check some members of a trained fleet against training alone: weights in float64, and outputs in float32.

    Of a run that is too long to compare, a shorter one is checked. In float32 the weights are not compared: where
    a gradient is zero but for rounding, as of the bias of attention's keys, Adam follows the rounding.
    """
    if job.steps > LONGEST:
        job = replace(job, epochs=max(1, LONGEST * job.epochs // job.steps))
        fleet, _ = train(job)
    some = job.of(job.sample())
    data = [(_tensor_in_float64(x), torch.as_tensor(y)) for x, y in some.data]
    exact = replace(some, make=partial(_in_float64, job.make), data=data)
    trained = train(exact)[0]
    for name, alone, _ in _alone(exact, trained, range(len(exact.rates))):
        accept(trained, name, alone, EXACT)
    return max(_outputs_differ(fleet, name, alone, x) for name, alone, x in _alone(job, fleet, job.sample()))


def _tensor_in_float64(x: np.ndarray) -> torch.Tensor:
    tensor = torch.as_tensor(x)
    return tensor.double() if tensor.is_floating_point() else tensor


def _in_float64(make: Callable[..., nn.Module], **arguments: Any) -> nn.Module:
    return make(**arguments).double()


def _alone(job: Job, fleet: mf.Fleet, members: Sequence[int]) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the name of each member, its copy that is trained alone, and its inputs."""
    names = [fleet.names[member] for member in members]
    before = build(job.of(members), names)  # the same names, so the same initial weights
    for name, member in zip(names, members, strict=True):
        data = job.data_of(member)
        recipe = {"optimizer": job.optimizers[member], "loss": "cross_entropy", "lr": job.rates[member]}
        alone = testing.alone(before[name], name, data, epochs=job.epochs, batch_size=job.batch, **recipe)
        yield name, alone, data[0]


def _outputs_differ(fleet: mf.Fleet, name: str, alone: nn.Module, inputs: Any) -> float:
    """How much a member's outputs differ from its copy's, relative to the largest; RuntimeError if too much."""
    rows = torch.as_tensor(inputs)[:512]
    found, expected = (_outputs(model, rows) for model in (fleet[name], alone))
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise RuntimeError(f"member {name!r} is not as alone: its outputs differ by {difference:.1e}")
    return difference


def _outputs(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    training = model.training
    with torch.no_grad():
        found = model.eval()(rows)
    model.train(training)
    return found


def by_loop(job: Job) -> Round:
    """The loop that people write, one member after the other."""
    job = job if job.loop_epochs is None else replace(job, epochs=min(job.epochs, job.loop_epochs))
    started = time.perf_counter()
    losses = []
    for member, (rate, optimizer) in enumerate(zip(job.rates, job.optimizers, strict=True)):
        model = job.make(**{name: values[member] for name, values in job.arguments.items()})
        x, y = (torch.as_tensor(part) for part in job.data_of(member))
        losses.append(_train_alone(model, OPTIMIZERS[optimizer](model.parameters(), lr=rate), x, y, job))
    seconds = time.perf_counter() - started
    return Round(len(job.rates) * job.steps, sum(losses) / len(losses), seconds)


def _train_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, job: Job
) -> float:
    total = torch.zeros(())
    for _ in range(job.epochs):
        total.zero_()
        for rows in torch.randperm(len(x)).split(job.batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(rows)
    return total.item() / len(x)


def by_lanes(job: Job) -> Round:
    """A fleet for each width, one after the other: what widths cost if they share nothing."""
    (values,) = job.arguments.values()
    started = time.perf_counter()
    losses = []
    for value in dict.fromkeys(values):
        _, loss = train(job.of([member for member, own in enumerate(values) if own == value]))
        losses.append(loss)
    seconds = time.perf_counter() - started
    return Round(len(job.rates) * job.steps, sum(losses) / len(losses), seconds)


def mlp(width: int, dropout: float = 0.0) -> nn.Module:
    """A classifier of twenty numbers."""
    return nn.Sequential(
        nn.Linear(20, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, 5),
    )


def image_mlp(width: int, dropout: float) -> nn.Module:
    """A classifier of 8×8 images with LayerNorm."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, width),
        nn.LayerNorm(width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, 10),
    )


def _blobs(rows: int, shape: tuple[int, ...], classes: int) -> Dataset:
    """Rows around one centre for each class: something that can be learnt, so that training is stable."""
    random = np.random.default_rng(0)
    y = random.integers(0, classes, rows)
    centres = random.standard_normal((classes, *shape))
    return (centres[y] + 1.5 * random.standard_normal((rows, *shape))).astype(np.float32), y


def _sweep(make: Callable[..., nn.Module], data: Dataset, epochs: int, quick: bool) -> Job:
    grid = product((1e-3, 3e-3, 1e-2), (24, 48, 96, 192), (0.0, 0.1, 0.25, 0.5), ("adam", "sgd"))
    members = list(grid)[:: 19 if quick else 1]
    rates, widths, dropouts, optimizers = zip(*members, strict=True)
    arguments = {"width": widths, "dropout": dropouts}
    return Job(make, arguments, [data], rates, optimizers, 1 if quick else epochs, 64, loop_epochs=30)


def _unlike(nets: Sequence[str], epochs: int) -> Job:
    rows = {net: replace(ROWS[ROW_OF[net]], examples=BATCH * STEPS) for net in nets}
    data = [datasets(row)[0] for row in rows.values()]
    count = len(nets)
    return Job(_net, {"net": list(nets)}, data, [1e-3] * count, ["adam"] * count, epochs)


def _net(net: str) -> nn.Module:
    return make_net(ROWS[ROW_OF[net]])


def job_of(name: str, case: str, quick: bool) -> Job:
    """The job of a contest, as long as its case says: "30 epochs" or "1,000 steps"."""
    number, unit = case.split()
    count = int(number.replace(",", ""))
    epochs = 1 if quick else count if unit == "epochs" else count // STEPS
    if name == "sweep":
        return _sweep(mlp, _blobs(1500, (20,), 5), epochs, quick)
    if name == "sweep-digits":
        return _sweep(image_mlp, _blobs(1797, (8, 8), 10), epochs, quick)
    if name == "widths":
        widths = [width for width in range(16, 208, 64 if quick else 4) for _ in range(2)]
        members = len(widths)
        data = [_blobs(1500, (20,), 5)]
        return Job(mlp, {"width": widths}, data, [1e-3] * members, ["adam"] * members, epochs, 64)
    if name == "equal":
        row = replace(MLP_64, members=4 if quick else MLP_64.members, examples=BATCH * STEPS)
        rates = row.rates().tolist()
        return Job(partial(make_net, row), {}, datasets(row), rates, ["adam"] * row.members, epochs)
    return _unlike(NETS if name == "four" else [name], epochs)

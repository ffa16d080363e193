"""What rows feel and draw beside padding, and when they can be cut. On devices: `test_process_group.py`."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers import fit, toy
from torch import Tensor, nn

import modelfleet as mf
from modelfleet import testing
from modelfleet.frameworks.torch.fused.steps import Steps
from modelfleet.frameworks.torch.losses import resolve
from modelfleet.frameworks.torch.parallel.row_independence import divide_by_rows, ignores_padding
from modelfleet.frameworks.torch.task import Task


class Seldom(nn.Module):
    """Drops a number between its layers once in a while; the mask has the time first, and the row second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(1, 4, num_layers=2, dropout=0.003)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x[:, :2].t().unsqueeze(2))[0][-1])


def test_a_rare_dropout_beside_padding_is_that_of_the_member_alone() -> None:
    torch.manual_seed(0)
    fleet = mf.Fleet([Seldom(), Seldom()])
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    data = [toy(8, seed=1), toy(5, seed=2)]
    expected = [
        testing.alone(
            fleet[name], name, own, optimizer="sgd", loss="cross_entropy", lr=0.1, epochs=40, batch_size=8
        )
        for name, own in zip(fleet.names, data, strict=True)
    ]
    fit(fleet, mf.each(data), epochs=40, batch_size=8, strategy="fused")
    for name, model in zip(fleet.names, expected, strict=True):
        difference, where = testing.largest_difference(fleet[name], model)
        assert difference < 1e-5, (name, where, difference)


class Hiding(nn.Module):
    """Feels the other rows of its batch, but at its first weights it does not show."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.first = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6, track_running_stats=where != "statistics")
        self.gate = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(6, 3)
        with torch.no_grad():
            if where in ("head", "statistics"):
                self.head.weight.zero_()
            if where == "gamma":
                self.norm.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.where == "gate":
            return self.head(hidden + self.gate * (hidden - hidden.mean(0)))
        if self.where == "unread":
            self.norm(hidden)
            return self.head(hidden)
        return self.head(hidden + self.norm(hidden) if self.where == "gamma" else self.norm(hidden))


PLACES = ["head", "gamma", "gate", "statistics", "unread"]


def tried(model: nn.Module, task: Task, check: Callable[..., Any], *args: Any) -> Any:
    """Ask a check of one member, and see that it leaves the member and the data as they are."""
    before, data = copy.deepcopy(model.state_dict()), copy.deepcopy(args)
    state = {
        "params": {name: p.detach().unsqueeze(0) for name, p in model.named_parameters()},
        "frozen": {},
        "buffers": {name: b.unsqueeze(0) for name, b in model.named_buffers()},
        "member": {"seed": torch.tensor([5]), "step": torch.tensor([0.0])},
    }
    generator = torch.get_rng_state()
    found = check(Steps(model, task, frozenset()), state, {}, *args)
    assert torch.equal(torch.get_rng_state(), generator)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for left, right in zip(tensors_in(args), tensors_in(data), strict=True):
        assert torch.equal(left, right)
    return found


def tensors_in(args: Any) -> list[Tensor]:
    return [leaf for arg in args if isinstance(arg, tuple) for leaf in arg]


def task_of(loss: Any = None, objective: Any = None) -> Task:
    optimizer: Any = None  # nothing is updated
    return Task(optimizer, None if loss is None else resolve(loss), objective)


BATCH = torch.randn(9, 8, generator=torch.Generator().manual_seed(1)), torch.arange(9) % 3


@pytest.mark.parametrize("where", PLACES)
def test_padding_is_felt_though_the_first_weights_hide_it(where: str) -> None:
    assert not tried(Hiding(where), task_of("cross_entropy"), ignores_padding, BATCH, 6)


@pytest.mark.parametrize("where", PLACES)
def test_rows_that_feel_each_other_are_not_divided_though_the_first_weights_hide_it(where: str) -> None:
    found = tried(Hiding(where), task_of("cross_entropy"), divide_by_rows, BATCH, BATCH[0])
    assert isinstance(found, str)
    assert "train the model on one device" in found


def test_rows_that_feel_nothing_bear_padding_and_are_divided() -> None:
    model = nn.Sequential(
        nn.Linear(8, 6), nn.LayerNorm(6), nn.Dropout(0.1), nn.ReLU(inplace=True), nn.Linear(6, 3)
    )
    assert tried(model, task_of("cross_entropy"), ignores_padding, BATCH, 6)
    assert tried(model, task_of("cross_entropy"), divide_by_rows, BATCH, BATCH[0]) == (((1, 6), 0),)


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2.0))


def test_no_trial_writes_into_the_data() -> None:
    assert tried(Overwriting(), task_of("cross_entropy"), ignores_padding, BATCH, 6)
    assert tried(Overwriting(), task_of("cross_entropy"), divide_by_rows, BATCH, BATCH[0]) == ()


@pytest.mark.parametrize("where", ["head", "gamma", "unread"])
def test_members_whose_weights_hide_a_batchnorm_train_beside_padding_as_alone(where: str) -> None:
    torch.manual_seed(0)
    fleet = mf.Fleet([Hiding(where).double(), Hiding(where).double()])
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    data = [(torch.randn(rows, 8, dtype=torch.float64), torch.arange(rows) % 3) for rows in (8, 5)]
    plain = [copy.deepcopy(fleet[name]) for name in fleet.names]
    fleet.fit(mf.each(data), epochs=5, batch_size=8, shuffle=False, strategy="fused", progress=False)
    for name, model, (x, y) in zip(fleet.names, plain, data, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(fleet[name].state_dict()[key], tensor, rtol=1e-9, atol=1e-11, msg=key)


WEIGHT = torch.tensor([0.2, 1.0, 3.0])
LOSSES: dict[str, Any] = {
    "class weights": nn.CrossEntropyLoss(weight=WEIGHT),
    "class weights, ignored, smoothed": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1, label_smoothing=0.1),
    "an index to ignore": nn.CrossEntropyLoss(ignore_index=2),
    "a sum": nn.CrossEntropyLoss(reduction="sum"),
    "a weighted sum": nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum"),
    "a function that is a mean": lambda output, target: nn.functional.cross_entropy(output, target),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_parts_of_a_batch_add_up_to_its_loss(name: str) -> None:
    model, (x, y) = nn.Linear(8, 3), BATCH
    task = task_of(LOSSES[name])
    assert tried(model, task, divide_by_rows, (x, y), x) == ()
    whole, _ = task.run(model, (x, y), None)
    parts = [task.partial_loss(model, (x[rows], y[rows]), None, torch.tensor(size / 9))[:2] for rows, size in CUTS]
    total, count = (sum(column) for column in zip(*parts, strict=True))
    torch.testing.assert_close(total / count, whole, check_dtype=False, rtol=1e-6, atol=1e-6)


CUTS = [(slice(0, 2), 2), (slice(2, 9), 7)]


@pytest.mark.parametrize(
    "task",
    [
        task_of(lambda output, target: nn.functional.cross_entropy(output, target, reduction="sum")),
        task_of(lambda output, target: nn.functional.cross_entropy(output, target, WEIGHT)),
        task_of(objective=lambda model, batch: (model(batch[0]) ** 2).sum()),
        task_of(objective=lambda model, batch: model(batch[0]).std()),
    ],
)
def test_a_function_that_is_no_mean_of_its_rows_is_refused(task: Task) -> None:
    found = tried(nn.Linear(8, 3), task, divide_by_rows, BATCH, BATCH[0])
    assert found.startswith("its loss on a batch is not the mean of its rows' losses. Return the mean over the")


def test_an_objective_that_shuffles_its_rows_is_refused() -> None:
    def mixup(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x + x[torch.randperm(len(x))]), y)

    found = tried(nn.Linear(8, 3), task_of(objective=mixup), divide_by_rows, BATCH, BATCH[0])
    assert "shuffles the rows of its batch" in found


class Centered(nn.Module):
    """Takes the mean over the rows away, or the number of rows in."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.head, self.how = nn.Linear(3, 2), how

    def forward(self, x: Tensor) -> Tensor:
        found = self.head(x)
        return found - found.mean(0) if self.how == "mean" else found / len(x)


@pytest.mark.parametrize("how", ["mean", "count"])
def test_outputs_of_unlike_row_counts_are_those_alone(how: str) -> None:
    torch.manual_seed(0)
    models = [Centered(how).double() for _ in range(4)]
    data = [torch.randn(rows, 3, dtype=torch.float64) for rows in (5, 12, 7, 12)]
    found = mf.Fleet(models).predict(mf.each(data), batch_size=8)
    for number, (model, x) in enumerate(zip(models, data, strict=True)):
        alone = torch.cat([model(part) for part in x.split(8)]).detach()
        torch.testing.assert_close(torch.from_numpy(found[str(number)]), alone, rtol=0, atol=1e-12)

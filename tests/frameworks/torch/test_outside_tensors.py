"""Tensors that are no part of the model: shared inputs of a fused program, live and never written to."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.frameworks.torch import comparing
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Masked(nn.Module):
    """Has a plain tensor as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.mask = torch.tensor([1.0, 0.5, 0.0, 2.0], dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.mask)


def check(make: Any, objective: Any, **recipe: Any) -> mf.Fleet:
    """Train a fleet fused and compare it with plain loops."""
    data, models = comparing.rows(), comparing.build(make)
    expected = comparing.plainly(models, objective, data)
    fleet = comparing.compiled(models, **(recipe or {"objective": objective}))
    comparing.fit(fleet, data)
    assert comparing.reason(fleet, data) is None
    comparing.assert_equal(models, expected)
    return fleet


def test_class_weights_in_a_closure_fuse() -> None:
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight)

    check(mlp, objective)
    check(mlp, objective, loss=lambda output, target: F.cross_entropy(output, target, weight=weight))
    check(mlp, objective, loss=nn.CrossEntropyLoss(weight=weight))


def test_a_positive_weight_in_a_loss_module_fuses() -> None:
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return loss(model(batch[0]), F.one_hot(batch[1], 3).double())

    check(mlp, objective)


def test_a_teacher_in_a_closure_fuses_and_stays_as_it_is() -> None:
    torch.manual_seed(9)
    teacher = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    before = copy.deepcopy(teacher.state_dict())

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), teacher(batch[0]).detach())

    check(mlp, objective)
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_plain_tensor_attribute_fuses() -> None:
    check(Masked, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))


def test_a_change_in_place_between_epochs_is_seen_without_another_trace() -> None:
    weight = torch.ones(3, dtype=torch.float64)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight)

    def anneal() -> None:
        weight.mul_(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))

    class Anneal(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            anneal()

    data, models = comparing.rows(), comparing.build(mlp)
    expected = comparing.plainly(
        models, objective, data, epochs=3, after_epoch=anneal, before=lambda: [weight.fill_(1.0)].clear()
    )
    weight.fill_(1.0)
    fleet = comparing.compiled(models, objective=objective)
    comparing.fit(fleet, data, epochs=3, callbacks=[Anneal()])
    comparing.assert_equal(models, expected)


def test_an_outside_tensor_is_an_input_of_the_compiled_program() -> None:
    from modelfleet.frameworks.torch.compiling.graph_source import ONE_WIDTH, GraphSource
    from modelfleet.frameworks.torch.tracing.trace import trace

    weight, constant = torch.tensor([1.0, 2.0]), [3.0, 4.0]
    program = trace(
        lambda state, shared, x: x * weight + torch.tensor(constant) * weight,
        (torch.zeros(1), {}, torch.ones(2)),
        (True, False, False),
    )
    assert len(program.outside) == 1
    assert program.outside[0] is weight
    assert program.graph is not None
    source = GraphSource.of(program.graph, program.inputs, ONE_WIDTH)
    assert [tensor.tolist() for tensor in source.constants.values()] == [constant]
    assert len(source.inputs) == 3
    weight.mul_(10)
    assert program([torch.zeros(1), torch.ones(2)]).tolist() == [40.0, 100.0]
    assert source.function()(torch.zeros(1), torch.ones(2), weight)[0].tolist() == [40.0, 100.0]


@pytest.mark.filterwarnings("ignore:members .* take turns:modelfleet.FleetWarning")
def test_an_objective_that_writes_to_an_outside_tensor_is_not_fused() -> None:
    bank = torch.zeros(3, dtype=torch.float64)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        loss = (output - bank).square().mean() + F.cross_entropy(output, batch[1])
        bank.mul_(0.5).add_(1.0)
        return loss

    data, models = comparing.rows(), comparing.build(mlp)
    fleet = comparing.compiled(models, objective=objective)
    assert "writes to a tensor that is not part of the model" in str(comparing.reason(fleet, data))


def test_reading_the_values_of_an_outside_tensor_is_not_fused() -> None:
    sizes = torch.tensor([1.0, 2.0])

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * sum(sizes.tolist())

    fleet = comparing.compiled(comparing.build(mlp), objective=objective)
    assert "reads the values of a tensor" in str(comparing.reason(fleet, comparing.rows()))


class InPlace(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0.0
        x.mul_(2.0)
        return self.layer(x)


@pytest.mark.parametrize("own_data", [False, True])
def test_a_forward_that_changes_its_input_changes_no_array_of_the_user(own_data: bool) -> None:
    data, models = comparing.rows(), comparing.build(InPlace)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].clone()), batch[1])

    expected = comparing.plainly(models, objective, data)
    given = (data[0].clone(), data[1].clone())
    feed: Any = mf.each([given] * 3) if own_data else given
    fleet = comparing.compiled(models, loss="cross_entropy")
    comparing.fit(fleet, feed)
    assert comparing.reason(fleet, feed) is None
    comparing.assert_equal(models, expected)
    predicted = fleet.predict(mf.each([given[0]] * 3) if own_data else given[0], batch_size=5)
    losses = fleet.evaluate(feed, batch_size=5)
    assert torch.equal(given[0], data[0])
    for place, model in enumerate(expected):
        output = model.eval()(data[0].clone())
        assert np.abs(predicted[str(place)] - output.detach().numpy()).max() < 1e-12
        assert abs(losses[str(place)]["loss"] - F.cross_entropy(output, data[1]).item()) < 1e-12


class Clamped(nn.Module):
    """Changes its own weights in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        return self.layer(x)


def test_a_forward_that_changes_a_parameter_is_not_fused() -> None:
    fleet = comparing.compiled(comparing.build(Clamped), loss="cross_entropy")
    assert "changes its parameter layer.weight" in str(comparing.reason(fleet, comparing.rows()))

"""What an objective may ask of parameters and gradients in a fused step, as in a plain loop."""

from typing import Any

import pytest
import torch
from tests.frameworks.torch import comparing
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector


class Net(nn.Module):
    """Has a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def ordinary(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def penalty_by_class(model: nn.Module, batch: Any) -> Tensor:
    values = [value for part in model.modules() for value in vars(part)["_parameters"].values()]
    return ordinary(model, batch) + sum(p.square().sum() for p in values if isinstance(p, nn.Parameter))


def penalty_by_requires_grad(model: nn.Module, batch: Any) -> Tensor:
    trained = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
    return ordinary(model, batch) + 0.1 * len(trained) * sum(p.abs().sum() for p in trained)


def penalty_by_view(model: nn.Module, batch: Any) -> Tensor:
    return ordinary(model, batch) + sum(p.view(-1).square().sum() for p in model.parameters())


def penalty_by_vector(model: nn.Module, batch: Any) -> Tensor:
    vector = parameters_to_vector(model.parameters())
    return ordinary(model, batch) + 1e-3 * (vector * torch.arange(len(vector))).square().mean()


def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].requires_grad_(True)
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.cross_entropy(output, batch[1]) + (slope.norm(dim=1) - 1).square().mean()


def physics(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].detach().clone().requires_grad_()
    u = model(x)
    first = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
    second = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)[0]
    return (second[:, 0] + u[:, 0]).square().mean()


def norm_of_gradients(model: nn.Module, batch: Any) -> Tensor:
    loss = ordinary(model, batch)
    own = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, own, create_graph=True)
    return loss + 0.1 * sum(g.square().sum() for g in found)


OBJECTIVES = [
    *(penalty_by_class, penalty_by_requires_grad, penalty_by_view, penalty_by_vector),
    *(gradient_penalty, physics, norm_of_gradients),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_sees_parameters_and_gradients_as_in_a_plain_loop(objective: Any) -> None:
    data, models = comparing.rows(), comparing.build(Net, 2)
    expected = comparing.plainly(models, objective, data)
    fleet = comparing.compiled(models, objective=objective)
    comparing.fit(fleet, data)
    assert comparing.reason(fleet, data) is None
    comparing.assert_equal(models, expected)
    losses = fleet.evaluate(data, batch_size=12)
    for place, model in enumerate(expected):
        loss = objective(model.eval(), (data[0].clone(), data[1])).item()
        assert abs(losses[str(place)]["loss"] - loss) < 1e-12


class Force(nn.Module):
    """Gives the derivative of an energy, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        with torch.enable_grad():
            energy = torch.tanh(self.layer(x)).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0][:, :3]


def test_a_forward_that_differentiates_predicts() -> None:
    data, models = comparing.rows(), comparing.build(Force, 2)
    expected = comparing.plainly(models, ordinary, data)
    fleet = comparing.compiled(models, loss="cross_entropy")
    comparing.fit(fleet, data)
    assert comparing.reason(fleet, data) is None
    comparing.assert_equal(models, expected)
    for place, output in enumerate(fleet.predict(data[0], batch_size=5).values()):
        alone = expected[place](data[0].clone()).detach().numpy()
        assert abs(output - alone).max() < 1e-12


COLLOCATION = torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4).requires_grad_()


def by_its_own_points(model: nn.Module, batch: Any) -> Tensor:
    u = model(COLLOCATION)
    return torch.autograd.grad(u.sum(), COLLOCATION, create_graph=True)[0].square().mean()


def by_backward(model: nn.Module, batch: Any) -> Tensor:
    model(batch[0]).sum().backward()
    return ordinary(model, batch)


def by_a_switch(model: nn.Module, batch: Any) -> Tensor:
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return ordinary(model, batch)


REFUSED = {
    by_its_own_points: "differentiates with respect to a tensor that comes from neither the batch nor the model",
    by_backward: "calls backward() itself",
    by_a_switch: "switches requires_grad of its parameter first.weight",
}


@pytest.mark.parametrize("objective", REFUSED)
def test_what_a_fused_step_would_get_wrong_is_not_fused(objective: Any) -> None:
    fleet = comparing.compiled(comparing.build(Net, 2), objective=objective)
    assert REFUSED[objective] in str(comparing.reason(fleet, comparing.rows()))

"""Structures of many models together: always those of `signature`, which plainly like models share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelfleet.frameworks.torch import likeness, walking
from modelfleet.frameworks.torch.structure import signature


class Holder(nn.Module):
    """A model that holds a value of any kind."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def mlp(width: int = 4, **kwargs: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width, **kwargs), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))


def changed(change: Callable[[Any], object]) -> nn.Module:
    model = mlp()
    change(model)
    return model


def tied() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def viewing() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach()[:2])
    return model


def twice() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, layer)


def with_buffer(*, persistent: bool) -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_buffer("mean", torch.zeros(3), persistent=persistent)
    return model


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "wider": lambda: mlp(5),
    "without a bias": lambda: mlp(bias=False),
    "another rate": lambda: changed(lambda model: setattr(model[2], "p", 0.2)),
    "in evaluation mode": lambda: mlp().eval(),
    "frozen": lambda: changed(lambda model: model[0].weight.requires_grad_(False)),
    "in float64": lambda: mlp().double(),
    "with a hook": lambda: changed(lambda model: model[1].register_forward_hook(len)),
    "with a backward hook": lambda: changed(lambda model: model[1].register_full_backward_hook(len)),
    "with a gradient's hook": lambda: changed(lambda model: model[0].weight.register_hook(abs)),
    "transposed": lambda: changed(lambda model: setattr(model[0].weight, "data", torch.ones(3, 4).T)),
    "tied": tied,
    "not tied": lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
    "a view": viewing,
    "a layer twice": twice,
    "a buffer": lambda: with_buffer(persistent=True),
    "a temporary buffer": lambda: with_buffer(persistent=False),
    "holds 1": lambda: Holder(1),
    "holds 1.0": lambda: Holder(1.0),
    "holds True": lambda: Holder(True),
    "holds nan": lambda: Holder(float("nan")),
    "holds 0.0": lambda: Holder(0.0),
    "holds -0.0": lambda: Holder(-0.0),
    "holds (1, 2)": lambda: Holder((1, 2)),
    "holds (1, (2,))": lambda: Holder((1, (2,))),
    "holds (1.0, 2)": lambda: Holder((1.0, 2)),
    "holds [1, 2]": lambda: Holder([1, 2]),
    "holds {}": lambda: Holder({"a": 1}),
    "holds a tensor": lambda: Holder(torch.ones(2)),
    "holds another tensor": lambda: Holder(torch.zeros(2)),
    "holds nothing": lambda: Holder(None),
}


def test_models_have_the_structures_that_they_have_alone() -> None:
    models = {(name, copy): make() for copy in range(2) for name, make in MAKERS.items()}
    found = dict(zip(models, likeness.signatures(list(models.values())), strict=True))
    alone = {name: signature(model) for name, model in models.items()}
    for one in models:
        assert [other for other in models if found[one] == found[other]] == [
            other for other in models if alone[one] == alone[other]
        ]


def test_a_structure_that_many_models_have_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[nn.Module] = []
    monkeypatch.setattr(likeness, "signature", lambda model: looked.append(model) or signature(model))
    models = [mlp() for _ in range(20)]
    found = likeness.signatures([*models, tied(), tied()])
    assert all(one is found[0] for one in found[:20])
    assert len(looked) == 1 + 2  # tied weights take a closer look


@pytest.mark.parametrize("name", MAKERS)
def test_a_quick_walk_finds_the_parameters_of_plain_models_only(name: str) -> None:
    model = MAKERS[name]()
    found = walking.plain_parameters(model)
    if name in ("tied", "a layer twice", "a buffer", "a temporary buffer"):
        assert found is None
    else:
        assert found is not None
        assert [*found.items()] == [*model.named_parameters()]


def test_a_quick_walk_ends_where_a_module_holds_itself() -> None:
    model = mlp()
    model.add_module("itself", model)
    assert walking.plain_parameters(model) is None
    assert len(list(walking.modules_of(model))) == len(list(model.modules()))

"""Stages run in turn equal the model that was cut: outputs, gradients, buffers, in both modes, for any rows."""

from typing import Any

import pytest
import torch
from tests.graph.split_models import CASES, Case
from torch import Tensor, nn
from torch.utils import _pytree

import modelfleet as mf
from modelfleet.trees import leaves, map_tree


def run(cut: mf.Split, x: Any) -> Any:
    """Run the stages one after the other, with what goes over the links."""
    made: dict[tuple[str, int], Tensor] = {("", number): leaf for number, leaf in enumerate(leaves(x))}
    found: Any = None
    for name, stage in cut.stages.items():
        own = sorted((link for link in cut.links if link.target == name), key=lambda link: link.input)
        assert [link.input for link in own] == list(range(len(own)))
        found = stage(*(made[link.source, link.output] for link in own))
        outputs = found if isinstance(found, tuple) else (found,)
        made |= {(name, number): output for number, output in enumerate(outputs)}
    return found


def call(model: nn.Module, x: Any) -> Any:
    return model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def gradients(model: nn.Module, output: Any) -> list[Tensor | None]:
    torch.manual_seed(1)
    ends = [own for own in tensors(output) if own.requires_grad]
    seeds = [torch.randn_like(own) for own in ends]
    return list(torch.autograd.grad(ends, list(model.parameters()), seeds, allow_unused=True))


def double(x: Any) -> Any:
    return map_tree(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, x)


def make(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make().double()


@pytest.mark.parametrize("name", CASES)
def test_stages_compute_what_the_model_computes(name: str) -> None:
    case = CASES[name]
    model = make(case)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    cut = mf.split(model, case.stages, double(case.inputs(4)))
    assert list(cut.stages) == [f"stage{number}" for number in range(case.stages)]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    for training, rows in ((True, 4), (False, 7), (True, 2), (False, 1)):
        x = double(case.inputs(rows))
        model.train(training)
        for stage in cut.stages.values():
            stage.train(training)
        kept = {key: value.clone() for key, value in model.state_dict().items()}
        torch.manual_seed(3)
        expected = call(model, x)
        expected_gradients = gradients(model, expected)
        changed = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(kept)
        torch.manual_seed(3)
        found = run(cut, x)
        assert type(found) is type(expected)
        for one, other in zip(tensors(found), tensors(expected), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert all(torch.equal(value, changed[key]) for key, value in model.state_dict().items())
        for one, other in zip(gradients(model, found), expected_gradients, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_stages_have_the_models_own_parameters_by_their_paths(name: str) -> None:
    case = CASES[name]
    model = make(case)
    cut = mf.split(model, 2, double(case.inputs(4)))
    own = dict(model.named_parameters())
    shared = [
        (cut.paths[name][path], parameter)
        for name, stage in cut.stages.items()
        for path, parameter in stage.named_parameters()
    ]
    assert {path for path, _ in shared} == set(own)
    assert len(shared) == len(own)
    assert all(own[path] is parameter for path, parameter in shared)
    assert sum(cut.parameters) == sum(parameter.numel() for parameter in own.values())

"""Recordings of the torch functions that a model's Python calls, and what differs between them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelfleet.frameworks.torch.tracing.recording import (
    Comparison,
    Origin,
    Recording,
    compare,
    recording,
    same_contents,
)

SINGLE: Any = np.float32(0.25)
X = torch.arange(12.0).view(3, 4)


def record(run: Callable[[Tensor], Any], x: Tensor = X) -> Recording:
    x = x.clone()
    with recording({Origin("input", 0): x}) as recorder:
        recorder.returned(run(x))
    return recorder.recording


def differences(*runs: Callable[[Tensor], Any]) -> Comparison:
    return compare([record(run) for run in runs])


def assert_equal(found: Comparison) -> None:
    assert found == Comparison()


def names(own: Recording) -> list[str]:
    return [call.name for call in own.calls]


def test_calls_are_named_as_users_write_them() -> None:
    own = record(lambda x: F.dropout(x.mul(2.0), 0.1) + torch.full((4,), 0.5) + x.shape[0])
    assert names(own) == [
        *("Tensor.mul", "F.dropout", "torch.full", "Tensor.add", "Tensor.shape", "Tensor.add", "return")
    ]


def test_only_the_functions_that_python_calls_are_recorded() -> None:
    assert names(record(lambda x: F.multi_margin_loss(x, torch.zeros(3, dtype=torch.int64)))) == [
        *("torch.zeros", "F.multi_margin_loss", "return")
    ]


def test_equal_runs_have_no_difference() -> None:
    assert_equal(differences(lambda x: F.dropout(x, 0.1), lambda x: F.dropout(x, 0.1)))


def test_it_does_not_matter_how_an_argument_is_given() -> None:
    assert_equal(differences(lambda x: F.dropout(x, 0.5, True), lambda x: F.dropout(x, training=True)))


def test_a_float_that_differs_is_found_with_its_path() -> None:
    found = differences(lambda x: F.dropout(x * 3.0, 0.1), lambda x: F.dropout(x * 3.0, p=0.2))
    assert found.floats == [(1, ("p",), (0.1, 0.2))]
    assert found == Comparison(floats=found.floats)


def test_a_float_within_a_list_is_found() -> None:
    found = differences(lambda x: x + torch.tensor([1.0, 2.0, 3, 4]), lambda x: x + torch.tensor([1.0, 5.0, 3, 4]))
    assert found.floats == [(0, (0, 1), (2.0, 5.0))]


def test_an_int_beside_a_float_is_a_float() -> None:
    found = differences(lambda x: F.dropout(x, 0), lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 1))
    assert found.floats == [(0, ("p",), (0, 0.5, 1))]


def test_numbers_of_numpy_are_floats() -> None:
    found = differences(lambda x: x * np.float64(0.5), lambda x: x * SINGLE, lambda x: x * 0.125)
    assert found.floats == [(0, (1,), (0.5, 0.25, 0.125))]


def test_signed_zeros_differ_and_nan_does_not() -> None:
    found = differences(lambda x: x * 0.0, lambda x: x * -0.0)
    assert len(found.floats) == 1
    assert_equal(differences(lambda x: x * float("nan"), lambda x: x * float("nan")))


def test_an_int_that_differs_is_no_float() -> None:
    found = differences(lambda x: x.sum(0), lambda x: x.sum(-2))
    assert found == Comparison(integers=[(0, (1,), (0, -2))])  # type: ignore[list-item]


def test_a_flag_that_differs_is_another_difference() -> None:
    found = differences(lambda x: F.dropout(x, 0.5, True), lambda x: F.dropout(x, 0.5, False))
    assert found.other == "training= of F.dropout is True, and False for others"


def test_a_branch_is_another_difference() -> None:
    found = differences(lambda x: F.relu(x), lambda x: F.gelu(x))
    assert found.other == "it calls F.relu where others call F.gelu"


def test_a_call_less_is_another_difference() -> None:
    found = differences(lambda x: F.relu(x).exp(), lambda x: F.relu(x))
    assert found.other == "it calls Tensor.exp where others call return"


def test_the_same_call_on_another_tensor_is_another_difference() -> None:
    found = differences(lambda x: (x + x).exp() + x, lambda x: (x + x).exp() + x.exp())
    assert found.other == "it calls Tensor.add where others call Tensor.exp"
    found = differences(lambda x: [x.exp(), x.sin(), 0][0] + 1, lambda x: [x.exp(), x.sin(), 0][1] + 1)
    assert found.other == "argument 1 of Tensor.add is another tensor for some members"


def test_a_number_that_is_only_returned_is_another_difference_or_a_float() -> None:
    found = differences(lambda x: (x, 0.1), lambda x: (x, 0.2))
    assert found.floats == [(0, (1,), (0.1, 0.2))]
    assert differences(lambda x: {"a": x}, lambda x: {"b": x}).other is not None


def test_outside_tensors_are_compared_by_their_contents() -> None:
    first, same, other = torch.ones(4), torch.ones(4), torch.full((4,), 2.0)
    assert_equal(differences(lambda x: x * first, lambda x: x * same))
    found = differences(lambda x: x * first, lambda x: x * other)
    ((call, path, tensors),) = found.outside
    assert (call, path) == (0, (1,))
    assert tensors == (first, other) or all(a is b for a, b in zip(tensors, (first, other), strict=True))


def test_tensors_that_no_function_made_are_outside() -> None:
    found = differences(lambda x: x + torch.Tensor([0.1]), lambda x: x + torch.Tensor([0.2]))
    assert len(found.outside) == 1


def test_a_written_outside_tensor_is_noticed() -> None:
    weight = torch.ones(4)
    own = record(lambda x: x * weight)
    assert own.same_outside()
    weight.add_(1)
    assert not own.same_outside()


def test_shapes_that_differ_are_found() -> None:
    narrow, wide = record(lambda x: x.exp().sum()), record(lambda x: x.exp().sum(), torch.ones(3, 6))
    found = compare([narrow, wide])
    assert found.other is None
    assert found.shapes[:2] == [(0, (0,), ((3, 4), (3, 6))), (0, ("result",), ((3, 4), (3, 6)))]


def test_another_rank_or_dtype_is_another_difference() -> None:
    assert compare([record(torch.exp), record(torch.exp, torch.ones(3))]).other is not None
    assert compare([record(torch.exp), record(torch.exp, torch.ones(3, 4).double())]).other is not None


def test_whether_gradients_are_recorded_counts() -> None:
    def run(on: bool) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with torch.set_grad_enabled(on):
                return x * 2

        return forward

    assert differences(run(True), run(False)).other is not None


def test_autocast_counts() -> None:
    def run(on: bool) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                return x.exp()

        return forward

    assert "autocast" in str(differences(run(True), run(False)).other)


class Reversed(torch.autograd.Function):
    """Multiplies gradients by a number that no call of the forward has."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


def test_the_numbers_of_custom_functions_are_seen() -> None:
    found = differences(lambda x: Reversed.apply(x, 0.5), lambda x: Reversed.apply(x, 0.25))
    assert found.floats == [(0, (1,), (0.5, 0.25))]


def test_custom_functions_are_seen_below_vmap_as_they_are_alone() -> None:
    def record_mapped(x: Tensor) -> Recording:
        def run(row: Tensor) -> Tensor:
            with recording({Origin("input", 0): row}) as recorder:
                recorder.returned(Reversed.apply(row.exp(), 0.5) * 2.0)
            found.append(recorder.recording)
            return row

        found: list[Recording] = []
        torch.func.vmap(run)(x)
        return found[0]

    mapped, alone = record_mapped(X[None]), record(lambda x: Reversed.apply(x.exp(), 0.5) * 2.0)
    assert names(mapped) == names(alone) == ["Tensor.exp", "Reversed", "Tensor.mul", "return"]
    assert_equal(compare([mapped, alone]))


def test_custom_functions_of_different_classes_are_different() -> None:
    def make(scale: float) -> Callable[[Tensor], Tensor]:
        class Local(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.view_as(x)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                return grads[0] * scale

        return Local.apply

    same = make(0.5)
    assert_equal(differences(same, same))
    assert "Local" in str(differences(make(0.5), make(0.25)).other)


def test_a_hook_on_a_tensor_with_another_number_is_another_difference() -> None:
    def hooked(scale: float) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            y = x.requires_grad_() * 1.0
            y.register_hook(lambda grad: grad * scale)
            return y

        return forward

    assert_equal(differences(hooked(0.5), hooked(0.5)))
    assert "register_hook" in str(differences(hooked(0.5), hooked(0.25)).other)


def test_modules_with_numbers_differ_in_floats_only() -> None:
    def net(p: float, eps: float, slope: float) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=eps), nn.Dropout(p), nn.LeakyReLU(slope))

    models = [net(0.1, 1e-5, 0.01), net(0.2, 1e-3, 0.3)]
    found = []
    for model in models:
        given = {Origin("parameter", name): p for name, p in model.named_parameters()}
        with recording({**given, Origin("input", 0): X}) as recorder:
            recorder.returned(model(X))
        found.append(recorder.recording)
    compared = compare(found)
    assert [(path, values) for _, path, values in compared.floats] == [
        (("eps",), (1e-5, 1e-3)),
        (("p",), (0.1, 0.2)),
        (("negative_slope",), (0.01, 0.3)),
    ]
    assert compared == Comparison(floats=compared.floats)


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool])
def test_contents_are_compared_in_every_dtype(kind: torch.dtype) -> None:
    ones = torch.ones(3).to(kind)
    assert same_contents(ones, ones.clone())
    assert not same_contents(ones, torch.tensor([1, 0, 1]).to(kind))
    nans = torch.tensor([float("nan"), 1.0])
    assert same_contents(nans, nans.clone())

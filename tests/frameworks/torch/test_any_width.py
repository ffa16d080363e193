import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.frameworks.torch.compiling.any_width import FixedWidthError, merge_widths


def traced(width: int, step: object) -> fx.GraphModule:
    return make_fx(step, tracing_mode="fake")(torch.zeros(width, 4, 2), torch.zeros(width))  # type: ignore[arg-type]


def test_graphs_of_two_widths_make_one_for_any() -> None:
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x.reshape(-1, 2) + 1, x * y.view(x.shape[0], 1, 1).expand(x.shape[0], 4, 2)]

    merged = merge_widths(traced(5, step), 5, traced(3, step), 3)
    for width in (2, 3, 7):
        x, y = torch.randn(width, 4, 2), torch.randn(width)
        assert all(torch.equal(a, b) for a, b in zip(merged(x, y), step(x, y), strict=True))


def test_a_number_that_is_no_multiple_of_the_width_is_refused() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(x.shape[0] ** 2) + 1

    with pytest.raises(FixedWidthError, match="25 at width 5 and 9 at 3"):
        merge_widths(traced(5, step), 5, traced(3, step), 3)


def test_steps_that_do_other_things_at_another_width_are_refused() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return x.sin() if x.shape[0] > 4 else x.cos()

    with pytest.raises(FixedWidthError):
        merge_widths(traced(5, step), 5, traced(3, step), 3)


def test_a_constant_that_depends_on_the_width_is_refused() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return y * torch.tensor([float(x.shape[0])])

    with pytest.raises(FixedWidthError, match="the constant _tensor_constant0 depends on the width"):
        merge_widths(traced(5, step), 5, traced(3, step), 3)

"""What a forward changes of its model beside tensors can't come back from a worker process."""

import pytest
import torch
from torch import Tensor, nn

import modelfleet as mf


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) / self.calls


def test_a_model_that_counts_in_python_is_not_trained_in_processes() -> None:
    fleet = mf.Fleet([Counting(), Counting()])
    fleet.compile("sgd", "mse", lr=0.1)
    data = torch.randn(8, 3), torch.randn(8, 1)
    before = {name: fleet[name].layer.weight.clone() for name in fleet}
    with pytest.raises(mf.StrategyError, match=r"keeps state in Python: after a step, calls is 2, not 0"):
        fleet.fit(data, batch_size=4, progress=False, strategy="processes")
    for name in fleet:
        assert torch.equal(fleet[name].layer.weight, before[name])
    fleet.fit(data, batch_size=4, progress=False, strategy="interleaved")
    assert fleet["0"].calls == 2

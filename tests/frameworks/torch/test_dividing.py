"""What rows draw beside padding. How they are cut over devices is in `test_parallel.py`."""

import torch
from tests.helpers import fit, toy
from torch import Tensor, nn

import modelfleet as mf
from modelfleet import testing


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

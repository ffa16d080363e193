"""One loader for all members is read once, however many lanes there are: it shuffles alike for everyone."""

from collections.abc import Iterator

import torch
from tests.helpers import equal, mlp, weights
from torch.utils.data import DataLoader, TensorDataset

import modelfleet as mf


def _loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 4, generator=generator)
    return DataLoader(
        TensorDataset(x, torch.randint(0, 3, (40,), generator=generator)), batch_size=8, shuffle=True
    )


def _trained(widths: dict[str, int]) -> mf.Fleet:
    torch.manual_seed(0)
    models = {name: mlp(width) for name, width in widths.items()}
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    torch.manual_seed(1)
    fleet.fit(_loader(), epochs=3, progress=False)
    return fleet


def test_a_shuffling_loader_gives_a_member_the_same_batches_beside_members_of_another_structure() -> None:
    alone = _trained({"a": 6})
    beside = _trained({"a": 6, "b": 9})
    assert len(beside.plan().lanes) == 2
    assert equal(weights(alone["a"]), weights(beside["a"]))


def test_every_batch_is_read_once_for_all_lanes() -> None:
    read = []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(4):
            read.append(number)
            yield torch.randn(8, 4), torch.randint(0, 3, (8,))

    fleet = mf.Fleet({"a": mlp(6), "b": mlp(9), "c": mlp(5)})
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    history = fleet.fit(batches, epochs=2, progress=False)
    assert read == [0, 1, 2, 3] * 2
    assert history.epochs == 2

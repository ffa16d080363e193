"""Batches that are sent to a device while it computes: in order, from memory that is used again and again."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.standin.device import limited, listening
from tests.standin.models import X, Y, differing, fleet_on
from tests.standin.races import watching
from tests.standin.test_streams import UNLIKE, shown
from torch import Tensor

import modelfleet as mf
from modelfleet.feeds.arrays import ArrayFeed
from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.uploading import RING, Uploader, _Buffer

ONE = torch.device("standin", 0)
BUFFER_OF = _Buffer.of


def many_batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of changing sizes, all in the same memory."""
    x, y = np.empty_like(X), np.empty_like(Y)
    for number in range(30):
        rows = 8 if number % 7 else 5
        x[:rows], y[:rows] = X[number : number + rows] * number, Y[number : number + rows]
        yield x[:rows], y[:rows]


def uploader() -> Uploader:
    made = arrays.sender(ONE)
    assert isinstance(made, Uploader)
    return made


@pytest.mark.parametrize("strategy", ["fused", "interleaved", "threads", "auto"])
@pytest.mark.parametrize("devices", ["standin:0", "standin:0,standin:1"])
@pytest.mark.parametrize("kind", ["one", "own"])
def test_lanes_on_loaders(kind: str, devices: str, strategy: Any) -> None:
    if kind == "one" and strategy == "threads":
        pytest.skip("threads can't share a loader")
    data = many_batches if kind == "one" else mf.each({str(n): many_batches for n in range(4)})
    width = 6 if strategy == "fused" else UNLIKE
    with watching() as races:
        there = fleet_on(devices, width=width, members=4)
        there.fit(data, validation=data, epochs=2, progress=False, strategy=strategy)
        there.evaluate(data)
    assert shown(races.found) == []
    here = fleet_on("cpu", width=width, members=4)
    here.fit(data, validation=data, epochs=2, progress=False)
    assert differing(there, here) == []


def test_a_batch_that_is_read_before_it_has_arrived_is_a_race() -> None:
    with watching() as races:
        x = uploader().send(torch.ones(5), copy=True)()
        x + 1
        assert races.found == []
        with torch.Stream(ONE):  # which has not received it
            x + 1
    assert "does not wait for" in shown(races.found)[0]


def unchecked(self: _Buffer, size: int) -> Tensor:
    self.copied = None
    return BUFFER_OF(self, size)


def test_a_buffer_that_is_filled_before_its_copy_is_done_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    for waits in (True, False):
        if not waits:
            monkeypatch.setattr(_Buffer, "of", unchecked)
        with watching() as races:
            sender = uploader()
            for number in range(RING + 1):
                sender.send(torch.full((5,), float(number)), copy=True)()
        assert bool(races.found) != waits


def test_memory_of_a_batch_is_kept_until_its_reader_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for told in (True, False):
        if not told:
            monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
        with watching() as races:
            sender = uploader()
            for _ in range(3):
                x = sender.send(torch.ones(5), copy=True)()
                x + 1
                del x
        assert bool(races.found) != told


def test_batches_of_any_kind_arrive_as_they_were() -> None:
    tree = {
        "bool": torch.tensor([True, False, True]),
        "half": torch.randn(3, 2).to(torch.bfloat16),
        "complex": torch.randn(3, 2, dtype=torch.complex64).conj(),
        "turned": torch.randn(4, 3).T,
        "wide": torch.randn(3, 1).expand(3, 4),
        "images": torch.randn(3, 2, 4, 4).to(memory_format=torch.channels_last),
        "empty": torch.empty(3, 0),
        "there": torch.arange(3, device=ONE),
    }
    sender = uploader()
    for _ in range(RING + 2):
        received = sender.send(tree, copy=True)()
        for name, tensor in tree.items():
            own = received[name]
            assert own.device == ONE
            assert own.dtype == tensor.dtype
            assert own.stride() == tensor.to("cpu", copy=True).stride()
            assert torch.equal(own.cpu(), tensor.cpu())
        versions = {name: own._version for name, own in received.items()}
        received["bool"].logical_not_()
        assert {n: own._version for n, own in received.items() if n != "bool"} == {
            n: version for n, version in versions.items() if n != "bool"
        }


def test_the_ring_is_pinned_once_and_grows_with_the_batches() -> None:
    sender, pinned = uploader(), []
    with listening(lambda told: pinned.append(told.text) if told.kind == "pinned" else None):
        for size in (100, 50, 100, 2000):
            for _ in range(2 * RING):
                sender.send(torch.ones(size), copy=True)()
    assert len(pinned) == 2 * RING


# --- data that the device has no room for ------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_data_larger_than_the_device_are_sent_batch_by_batch(shuffle: bool) -> None:
    x, y = np.tile(X, (1000, 1)), np.tile(Y, 1000)  # 40,000 rows, 960 kB
    total = torch.accelerator.memory_allocated(0) + 1_500_000  # of which the data may have half
    options: dict[str, Any] = {"batch_size": 500, "progress": False, "shuffle": shuffle, "strategy": "fused"}
    there, ample = fleet_on("standin:0"), fleet_on("standin:1")
    with limited(0, total=total), watching() as races:
        there.fit((x, y), validation=(x, y), epochs=2, **options)
        evaluated = there.evaluate((x, y), batch_size=500)
    assert shown(races.found) == []
    ample.fit((x, y), validation=(x, y), epochs=2, **options)
    assert differing(there, ample) == []
    assert evaluated == ample.evaluate((x, y), batch_size=500)
    sent: list[str] = []
    with limited(0, total=total), listening(lambda told: sent.append(f"{told.kind} {told.text}")):
        there.fit((x, y), **options)
    assert not [text for text in sent if text.startswith("h2d [40000")]
    assert len([text for text in sent if text.endswith(" async")]) >= 80, "one for each batch"


def test_data_that_are_on_the_device_stay_there() -> None:
    x, y = torch.from_numpy(np.tile(X, (500, 1))).to(ONE), torch.from_numpy(np.tile(Y, 500)).to(ONE)
    there = fleet_on("standin:0")
    copies = []
    with (
        limited(0, total=torch.accelerator.memory_allocated(0) + 700_000),
        listening(lambda told: copies.append(told.text) if told.kind == "d2h" else None),
    ):
        there.fit((x, y), batch_size=1000, progress=False, shuffle=False)
    assert not [text for text in copies if text.startswith("[20000")]


# --- shuffles ----------------------------------------------------------------------------------------------------


def test_the_next_order_is_worked_out_while_an_accelerator_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[bool] = []
    order = ArrayFeed._order

    def spied(self: ArrayFeed, passes: np.ndarray) -> np.ndarray | None:
        prepared.append(self._ahead is not None)
        return order(self, passes)

    monkeypatch.setattr(ArrayFeed, "_order", spied)
    there, here = fleet_on("standin:0"), fleet_on("cpu")
    there.fit((X, Y), epochs=3, batch_size=8, progress=False, strategy="fused")
    assert prepared == [False, True, True]
    here.fit((X, Y), epochs=3, batch_size=8, progress=False)
    assert differing(there, here) == []

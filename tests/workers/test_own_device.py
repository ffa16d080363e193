"""A worker for a GPU is shown that GPU alone, and names it as the first."""

from collections.abc import Mapping

import pytest
from tests.workers import tasks

from modelfleet.devices import Device
from modelfleet.workers.own_device import OwnDevice, own_device
from modelfleet.workers.places import machine_places, shared_place

NAMES = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "MODELFLEET_DEVICE"]


@pytest.fixture(autouse=True)
def _all_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "4, 7"}, {"CUDA_VISIBLE_DEVICES": "7"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        ({"CUDA_VISIBLE_DEVICES": "4,7", "HIP_VISIBLE_DEVICES": "2,3"}, {"HIP_VISIBLE_DEVICES": "3"}),
    ],
)
def test_an_index_is_that_of_what_this_process_sees(
    environ: Mapping[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert own_device(Device("cuda", 1)) == OwnDevice(Device("cuda", 0), expected)


def test_what_can_not_be_hidden_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (Device("cpu", 1), Device("mps", 0), Device("standin", 1)):
        assert own_device(device) == OwnDevice(device)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")  # changed since the framework has looked
    assert own_device(Device("cuda", 1)) == OwnDevice(Device("cuda", 1))


def test_workers_on_two_gpus_see_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    places = machine_places([Device("cuda", 0), Device("cuda", 1)])
    assert [(place.name, place.device) for place in places] == [("cuda:0", "cuda:0"), ("cuda:1", "cuda:0")]
    workers = [place.hire() for place in places]
    for worker in workers:
        worker.start(tasks.environment, NAMES, "an order")
    found = [worker.receive()[1] for worker in workers]
    assert [own["CUDA_VISIBLE_DEVICES"] for own in found] == ["4", "7"]
    assert [own["MODELFLEET_DEVICE"] for own in found] == ["cuda:0", "cuda:1"]
    for worker in workers:
        worker.close()


def test_workers_that_share_a_gpu_see_no_other() -> None:
    place = shared_place(Device("cuda", 1), 3)
    assert (place.device, place.env) == ("cuda:0", {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "1"})
    place = shared_place(Device("cpu"), 3)
    assert (place.device, place.env) == ("", {"OMP_NUM_THREADS": "3"})

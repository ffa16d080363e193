"""Worker processes on an accelerator: each on its own device, with models of no device in particular."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.standin.device import Told, listening
from tests.standin.models import X, Y, close, dropping, fitted
from torch import nn

import modelfleet as mf
from modelfleet.frameworks.torch.parallel.process_group import ProcessGroup
from modelfleet.workers.pickling import pickle_value


def on_the_second() -> nn.Module:
    """A model that its owner has put on the second device."""
    return dropping().to("standin:1")


def test_models_are_sent_without_their_device() -> None:
    model = on_the_second()
    model.register_buffer("extra", torch.ones(2, dtype=torch.bfloat16, device="standin:0"))
    model.get_parameter("0.bias").requires_grad_(False)
    stream, views = pickle_value(model, "the model")
    sent = pickle.loads(stream, buffers=views)
    assert {tensor.device.type for tensor in (*sent.parameters(), *sent.buffers())} == {"cpu"}
    assert [p.requires_grad for p in sent.parameters()] == [p.requires_grad for p in model.parameters()]
    for name, tensor in model.state_dict().items():
        assert torch.equal(sent.state_dict()[name], tensor.cpu())


def test_processes_on_one_device_get_its_weights_and_the_plan_tells_their_cost() -> None:
    width = mf.each([6, 7])
    there, on_cpu = (
        fitted(device, (X, Y), {"strategy": strategy}, build=dropping, width=width, members=2)
        for device, strategy in (("standin:1", "processes"), ("cpu", "interleaved"))
    )
    close(there, on_cpu)
    plan = there.plan((X, Y), strategy="processes")
    assert "processes take turns on standin:1" in plan.note
    assert there.plan((X, Y)).note == ""


def test_each_rank_takes_its_own_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """As for CUDA, whose backend has to know the index: two ranks on one device would be refused."""
    known, asked = {**dist.Backend.default_device_backend_map, "standin": "nccl"}, []

    def init_process_group(backend: str, **options: Any) -> None:
        asked.append((backend, options["device_id"], torch.accelerator.current_device_index()))
        raise ConnectionError("there is no such device")

    monkeypatch.setattr(dist.Backend, "default_device_backend_map", known)
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with torch.accelerator.device_index(0), pytest.raises(mf.RankLostError):
        ProcessGroup.join(f"file://{tmp_path}/meeting", 0, 1, 1.0, device="standin:1")
    assert asked == [("cpu:gloo,standin:nccl", torch.device("standin", 1), 1)]


def test_ranks_agree_to_stop_without_the_devices(tmp_path: Any) -> None:
    told: list[Told] = []
    group = ProcessGroup.join(f"file://{tmp_path}/meeting", 0, 1, 10.0, device="standin:1")
    try:
        with listening(told.append):
            assert group.any(True)
            assert not group.any(False)
        assert told == []
        numbers = torch.arange(3.0, device="standin:1")
        group.sum([numbers])
        assert numbers.tolist() == [0, 1, 2]
    finally:
        group.close()

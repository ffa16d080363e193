"""Which of a large model's arrays a worker has in the memory that all workers share, and which are copies of ours.

The arrays are looked up, not the process's memory: what a framework packs or keeps depends on the processor.
"""

import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from modelfleet import frameworks
from modelfleet.devices import parse_devices
from modelfleet.trees import leaves
from modelfleet.workers import places
from modelfleet.workers.process import dismiss

TWO = parse_devices("cpu:0,cpu:1") or ()


def asked_by_two(framework: Any, large: Any, x: np.ndarray) -> list[tuple[float, float, np.ndarray]]:
    """Two workers with a replica of `large` at the same time: how many times its weights each reads from shared
    memory, how many times it holds them in memory of its own, and what it answered."""
    dismiss()  # new workers: one that has trained may hold the variables of that
    found = places.machine_places(TWO)
    shared = found[0].publish(getattr(framework, "frozen", lambda model: model)(large), "the model")
    workers = [place.hire() for place in found]
    try:
        for worker, place in zip(workers, found, strict=True):
            worker.start(_held, (framework.NAME, place.device, shared, x), "the model")
        told = [worker.receive()[1] for worker in workers]
        size = framework.weight_bytes(large)
        held = [(there / size, own / size, np.array(answer)) for there, own, answer in told]
        for worker in workers:
            worker.answer()
            worker.receive()
        return held
    finally:
        for worker, place in zip(workers, found, strict=True):
            place.release(worker)
        shared.close()


def _held(order: Any) -> Generator[Any, Any, None]:
    name, device, large, x = order
    framework = frameworks.adapter(name)
    native = framework.native(framework.choose(parse_devices(device))[0])
    model = large.get()
    replica = framework.Replica(model, native, "float32")
    answer = replica(x)
    arrays = {_address(leaf): leaf.nbytes for leaf in leaves(replica._state) if hasattr(leaf, "nbytes")}
    there = sum(size for address, size in arrays.items() if _is_shared(address))
    yield there, sum(arrays.values()) - there + _variables(), answer


def _address(array: Any) -> int:
    for asked in ("unsafe_buffer_pointer", "data_ptr"):  # of JAX, of torch
        if hasattr(array, asked):
            return getattr(array, asked)()
    return array.__array_interface__["data"][0]


def _is_shared(address: int) -> bool:
    """Whether an address is in memory that other processes of ours have, too."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, _, rest = line.partition(" ")
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return "/memfd:modelfleet" in rest
    return False


def _variables() -> int:
    """The bytes of all variables of TensorFlow, whose memory is its own and can't be lent."""
    gc.collect()
    kinds = {"ResourceVariable"}
    found = [one for one in gc.get_objects() if type(one).__name__ in kinds]
    return sum(one.shape.num_elements() * one.dtype.size for one in found)

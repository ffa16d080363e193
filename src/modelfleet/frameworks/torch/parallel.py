"""One lane over several devices: every device computes some rows of a batch, and the gradients are summed.

Each device has a process of its own with the very same lane in it: the same members, seeds and batches. A process
is a rank of a group. In a step a rank computes its own rows only; what they add to the gradients and to the sums
of the epoch is summed over all ranks; and every rank takes the same step with the same numbers. So all ranks hold
the same state after every step, that of one device with the whole batch, but for rounding.

    group = Group.join("file:///tmp/somewhere/new", rank=0, size=2, timeout=60.0)
    engine.spread(group)
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from modelfleet.errors import GroupError
from modelfleet.words import without_period

SECONDS_TO_TELL = 2.0  # given to the other ranks, after a failure, to say that they wait as well


class Group:
    """The processes that compute the rows of a lane's batches together. Make one with `join`.

    A process is in one group at a time. All ranks must take the same steps in the same order.
    """

    def __init__(self, rank: int, size: int, timeout: float, store: Any, device: str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.steps = 0  # sums taken so far
        self._store = store
        self._device = device

    @classmethod
    def join(cls, address: str, rank: int, size: int, timeout: float, *, device: str = "cpu") -> Self:
        """Meet the other ranks, and wait for them for up to `timeout` seconds, here and in every step.

        address: the same for all, and new for every group: `file:///a/path/that/does/not/exist/yet` on one
        machine, or `tcp://host:port`, where rank 0 listens.
        device: the type of the ranks' devices; "cuda" sums by NCCL, all others by gloo.
        """
        wait = timedelta(seconds=timeout)
        try:
            store, _, _ = next(dist.rendezvous(address, rank, size, timeout=wait))
            store.set_timeout(wait)
        except Exception as error:  # each kind of address raises its own
            raise GroupError(
                f"rank {rank} of {size} can't meet the others at {address!r}: {without_period(error)}. "
                f"Give all ranks one address that each of them can reach, and start all of them."
            ) from error
        group = cls(rank, size, timeout, store, device)
        try:
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
            group._say("joined")
            store.wait([f"joined/{other}" for other in range(size)], wait)
        except Exception as error:
            raise group._failed("joined", "to join", error) from error
        return group

    def rows(self, count: int) -> tuple[int, int]:
        """The first of this rank's rows in a batch of so many, and the first that is not."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all ranks, in place. They come out the same, bit for bit, on every rank."""
        self.steps += 1
        try:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in works:
                assert work is not None
                work.wait(timedelta(seconds=self.timeout))
        except Exception as error:  # what a backend raises on a lost or late peer is its own
            raise self._failed(f"step{self.steps}", f"in step {self.steps}", error) from error

    def any(self, flag: bool) -> bool:
        """Whether any rank says so: all of them get the same answer."""
        said = torch.tensor([float(flag)], device=self._device)
        self.sum([said])
        return bool(said.item() > 0)

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _say(self, where: str) -> None:
        self._store.set(f"{where}/{self.rank}", "")

    def _failed(self, where: str, what: str, error: Exception) -> GroupError:
        """An error that names those who have not come this far: the others wait in vain, too, and say so."""
        missing = []
        with suppress(Exception):  # the store is gone with the rank that held it
            self._say(where)
        for other in range(self.size):
            try:
                self._store.wait([f"{where}/{other}"], timedelta(seconds=SECONDS_TO_TELL))
            except Exception:
                if other != self.rank:
                    missing.append(str(other))
        names = f"rank {', '.join(missing)}" if missing else "the others"
        return GroupError(
            f"rank {self.rank} of {self.size} waited {what} for {names}, for {self.timeout:g} s at most: "
            f"{' '.join(str(error).split())[:200]}. That process has died, hangs, or is slower than this: see "
            f"what it said last; then begin again from the last checkpoint, or give a longer timeout."
        )

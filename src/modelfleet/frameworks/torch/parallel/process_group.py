"""One lane on several devices: every device computes some rows of a batch, and the gradients are summed.

Each device has a process of its own with the same lane in it: the same members, seeds and batches. A process is a
rank of a process group. In a step, a rank computes only its own rows. Their gradients and their share of the
epoch's sums are summed over all ranks, and every rank takes the same step with the same numbers. So after every
step all ranks hold the same state: that of one device with the whole batch, except for rounding.

    group = ProcessGroup.join("file:///tmp/somewhere/new", rank=0, size=2, timeout=60.0)
    engine.split_rows_over(group)
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from modelfleet.errors import RankLostError
from modelfleet.formatting import without_period

HOST = torch.device("cpu")
SECONDS_TO_REPORT = 2.0  # after a failure, the other ranks have this long to report that they are waiting, too


class ProcessGroup:
    """Processes that compute the rows of a lane's batches together. Create one with `join`.

    A process is in one group at a time. All ranks must take the same steps in the same order.

    Attributes:
        rank: The index of this process.
        size: The number of processes.
        timeout: How many seconds to wait for the others.
        steps: How many sums were taken so far.
        device: Where tensors must be to be sent: the rank's device, or the host if torch has no backend for it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        store: dist.Store | None,
        device: torch.device = HOST,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.steps = 0
        self._store = store
        self.device = device

    @classmethod
    def join(cls, address: str, rank: int, size: int, timeout: float, *, device: str = "cpu") -> Self:
        """Connect to the other ranks.

        Args:
            address: The same for all ranks, and new for every group: `file:///a/new/path` on one machine, or
                `tcp://host:port`, where rank 0 listens.
            rank: The index of this process.
            size: The number of processes.
            timeout: How many seconds to wait for the others, here and in every step.
            device: This rank's device, with its index. Its tensors are summed by the backend that torch has for
                it, such as NCCL for "cuda:1". What the host holds goes through gloo, and so does all else.

        Raises:
            RankLostError: The ranks do not find each other in time.
        """
        wait = timedelta(seconds=timeout)
        try:
            store, _, _ = next(dist.rendezvous(address, rank, size, timeout=wait))
            store.set_timeout(wait)
        except Exception as error:  # each kind of address raises another type
            raise RankLostError(
                f"rank {rank} of {size} can't connect to the others at {address!r}: {without_period(error)}. "
                f"Give all ranks one address that each of them can reach, and start all of them."
            ) from error
        own = torch.device(device)
        backend = _backend_of(own)
        group = cls(rank, size, timeout, store, HOST if backend is None else own)
        try:
            if own.type != "cpu":
                torch.accelerator.set_device_index(own.index)
            dist.init_process_group(
                "gloo" if backend is None else f"cpu:gloo,{own.type}:{backend}",
                store=store,
                rank=rank,
                world_size=size,
                timeout=wait,
                device_id=None if backend is None else own,
            )
            group._report("joined")
            store.wait([f"joined/{other}" for other in range(size)], wait)
        except Exception as error:
            raise group._failure("joined", "to join", error) from error
        return group

    def rows(self, count: int) -> tuple[int, int]:
        """Return the start and the end of this rank's rows in a batch of `count` rows."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all ranks, in place. The sums are equal on every rank, bit for bit.

        Raises:
            RankLostError: A rank is lost or late.
        """
        self.steps += 1
        try:
            summed = [tensor if tensor.device == HOST else tensor.to(self.device) for tensor in tensors]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in summed]
            for work, tensor, total in zip(works, tensors, summed, strict=True):
                assert work is not None
                if total.device == HOST:
                    work.wait(timedelta(seconds=self.timeout))
                else:
                    work.wait()  # the device waits; with a time limit the host would
                if total is not tensor:
                    tensor.copy_(total)
        except Exception as error:  # each backend raises another type for a lost or late rank
            raise self._failure(f"step{self.steps}", f"in step {self.steps}", error) from error

    def swap(self, parts: Sequence[bytes]) -> list[bytes]:
        """Give every rank a part, by rank. Return what every rank has given to this one.

        Args:
            parts: At least one byte for every rank.

        Raises:
            RankLostError: A rank is lost or late.
        """
        self.steps += 1
        given = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        taken = torch.empty_like(given)
        try:
            self._swap(taken, given, None, None)
            sizes = taken.tolist()
            found = torch.empty(sum(sizes), dtype=torch.uint8)
            sent = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
            self._swap(found, sent, sizes, given.tolist())
        except Exception as error:  # each backend raises another type for a lost or late rank
            raise self._failure(f"step{self.steps}", f"in step {self.steps}", error) from error
        return [part.numpy().tobytes() for part in found.split(sizes)]

    def _swap(
        self, taken: Tensor, given: Tensor, taken_sizes: list[int] | None, given_sizes: list[int] | None
    ) -> None:
        work = dist.all_to_all_single(taken, given, taken_sizes, given_sizes, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=self.timeout))

    def any(self, flag: bool) -> bool:
        """Return True on every rank if `flag` is True on any of them. No device waits, only the hosts do."""
        count = torch.tensor([float(flag)])
        self.sum([count])
        return bool(count.item() > 0)

    def close(self) -> None:
        """Leave the group.

        The store must end here, not when Python collects garbage: it then writes to its path once more, and that
        may name another file by then (`/proc/self/fd/7`).
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def _report(self, where: str) -> None:
        assert self._store is not None
        self._store.set(f"{where}/{self.rank}", "")

    def _failure(self, where: str, what: str, error: Exception) -> RankLostError:
        """Return an error that names the ranks that are missing. The others are waiting, too, and report that."""
        missing = []
        with suppress(Exception):  # the store is gone if the rank that held it is
            self._report(where)
        for other in range(self.size):
            try:
                assert self._store is not None
                self._store.wait([f"{where}/{other}"], timedelta(seconds=SECONDS_TO_REPORT))
            except Exception:
                if other != self.rank:
                    missing.append(str(other))
        names = f"rank {', '.join(missing)}" if missing else "the others"
        return RankLostError(
            f"rank {self.rank} of {self.size} waited {what} for {names}, for {self.timeout:g} s at most: "
            f"{' '.join(str(error).split())[:200]}. That process has died, hangs, or is too slow. Look at its "
            f"last output, then start again from the last checkpoint, or set a longer timeout."
        )


def _backend_of(device: torch.device) -> str | None:
    """Return the backend that sums tensors on an accelerator; None if they have to go through the host."""
    if device.type == "cpu":
        return None
    known: dict[str, str] = dist.Backend.default_device_backend_map
    found = known.get(device.type)
    return found if found not in (None, "gloo") and dist.is_backend_available(found) else None

"""Transport between ranks that are processes: a process group for each edge, direction and pair of ranks.

A message is a header of one number and the tensors. The header is 0 if the tensors have the form that the last
message of this channel with as many rows had. So receives are posted before the tensors are there. Otherwise it is
the length of the new form, which follows. Messages of a channel arrive in their order, and a receive is posted
only when the message before it has been taken: what it brings may be a new form.
"""

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from modelfleet.errors import RankLostError
from modelfleet.frameworks.torch.parallel.process_group import ProcessGroup
from modelfleet.trees import leaves, map_tree, rebuild
from modelfleet.types import Tree

Channel = tuple[str, bool, int, int]
"""An edge, whether it is its gradient, the sending rank, and the receiving rank."""


@dataclass(frozen=True)
class _Form:
    """Form of a message's tensors."""

    tree: Tree
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tree: Tree) -> "_Form":
        return cls(map_tree(lambda _: 0, tree), tuple((leaf.dtype, tuple(leaf.shape)) for leaf in leaves(tree)))

    def empty(self, device: torch.device) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in self.tensors]


@dataclass
class _Receiving:
    """Receives that are posted for one message."""

    micro: int
    header: Tensor
    works: list[Any]
    form: _Form | None
    tensors: list[Tensor]


class GroupTransport:
    """Transport of one rank that is a process. Create it with `join`, on all ranks at once."""

    def __init__(
        self,
        group: ProcessGroup,
        channels: dict[Channel, Any],
        sums: dict[tuple[int, ...], Any],
        device: torch.device,
    ) -> None:
        self._group, self._channels, self._sums, self._device = group, channels, sums, device
        self._timeout = timedelta(seconds=group.timeout)
        self._known: dict[tuple[Channel, int], _Form] = {}
        self._expected: dict[Channel, deque[int]] = {}  # micro-batches that are to come
        self._receiving: dict[Channel, _Receiving] = {}  # the first of them
        self._arrived: dict[tuple[Channel, int], Tree] = {}
        self._sending: list[tuple[Any, Tensor]] = []  # until a tensor has been sent, it must not be freed
        self._rows: Sequence[int] = ()

    @classmethod
    def join(
        cls,
        address: str,
        rank: int,
        size: int,
        timeout: float,
        *,
        channels: Sequence[Channel],
        sums: Sequence[tuple[int, ...]],
        device: torch.device,
    ) -> Self:
        """Connect to the other ranks, and make the groups.

        The arguments are the same on all ranks, but the rank.
        """
        group = ProcessGroup.join(address, rank, size, timeout, device=str(device))
        wait = timedelta(seconds=timeout)
        made = {
            channel: dist.new_group(sorted({channel[2], channel[3]}), timeout=wait, group_desc=f"{channel}")
            for channel in channels
        }
        summing = {ranks: dist.new_group(list(ranks), timeout=wait, group_desc=f"sum {ranks}") for ranks in sums}
        return cls(group, made, summing, device)

    def begin(self, step: int, rows: Sequence[int]) -> None:
        """Start a step."""
        self._rows = rows
        for work, _ in self._sending:
            work.wait(self._timeout)  # the other ranks have taken what was sent before the end of the last step
        self._sending = []

    def send(self, message: Any, tree: Tree) -> None:
        """Send tensors, without waiting until they have arrived."""
        channel = message.edge, message.gradient, message.source, message.target
        form, key = _Form.of(tree), (channel, self._rows[message.micro])
        known = self._known.get(key)
        if known == form:
            self._post(channel, torch.zeros(1, dtype=torch.int64, device=self._group.device))
        else:
            described = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8).to(self._group.device)
            self._post(channel, torch.tensor([len(described)], device=self._group.device))
            for tensor in known.empty(self._group.device) if known is not None else ():
                self._post(channel, tensor)  # the receiver has posted receives for the old form
            self._post(channel, described)
            self._known[key] = form
        for leaf in leaves(tree):
            self._post(channel, leaf.detach().to(self._group.device).contiguous())

    def expect(self, message: Any) -> None:
        """Post the receives of a message, if it is the next one of its channel."""
        channel = message.edge, message.gradient, message.source, message.target
        self._expected.setdefault(channel, deque()).append(message.micro)
        if channel not in self._receiving:
            self._post_receives(channel)

    def take(self, message: Any) -> Tree:
        """Wait for a message, and return its tensors."""
        channel = message.edge, message.gradient, message.source, message.target
        while (channel, message.micro) not in self._arrived:
            if channel not in self._receiving:
                self.expect(message)
            try:
                micro, tree = self._complete(channel)
            except RuntimeError as error:
                raise self._lost(f"{message} from rank {message.source}", error) from error
            self._arrived[channel, micro] = tree
            self._post_receives(channel)
        return self._arrived.pop((channel, message.micro))

    def _post_receives(self, channel: Channel) -> None:
        """Post the receives of the next message of a channel, if one is expected."""
        self._receiving.pop(channel, None)
        if not self._expected[channel]:
            return
        micro = self._expected[channel].popleft()
        form = self._known.get((channel, self._rows[micro]))
        header = torch.empty(1, dtype=torch.int64, device=self._group.device)
        tensors = [] if form is None else form.empty(self._group.device)
        works = [self._receive(channel, tensor) for tensor in (header, *tensors)]
        self._receiving[channel] = _Receiving(micro, header, works, form, tensors)

    def _complete(self, channel: Channel) -> tuple[int, Tree]:
        """Wait for the message whose receives are posted. Return its micro-batch and its tensors."""
        posted = self._receiving[channel]
        for work in posted.works:
            work.wait(self._timeout)
        form, tensors = posted.form, posted.tensors
        if length := int(posted.header):
            described = torch.empty(length, dtype=torch.uint8, device=self._group.device)
            self._receive(channel, described).wait(self._timeout)
            form = pickle.loads(described.cpu().numpy().tobytes())
            self._known[channel, self._rows[posted.micro]] = form
            tensors = form.empty(self._group.device)
            for work in [self._receive(channel, tensor) for tensor in tensors]:
                work.wait(self._timeout)
        assert form is not None
        return posted.micro, rebuild(form.tree, [tensor.to(self._device) for tensor in tensors])

    def sum(self, name: str, ranks: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Sum tensors over some ranks, in place."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        try:
            for together in by_dtype.values():
                flat = torch.cat([tensor.reshape(-1) for tensor in together]).to(self._group.device)
                work = dist.all_reduce(flat, group=self._sums[tuple(ranks)], async_op=True)
                assert work is not None
                work.wait(self._timeout)
                for tensor, part in zip(together, flat.split([t.numel() for t in together]), strict=True):
                    tensor.copy_(part.view_as(tensor))
        except RuntimeError as error:
            raise self._lost(f"the sum of {name} over ranks {', '.join(map(str, ranks))}", error) from error

    def close(self) -> None:
        """Leave the groups.

        Nothing here refers to them any more, so that they end at once: see `ProcessGroup.close`.
        """
        self._sending.clear()
        self._receiving.clear()
        self._channels.clear()
        self._sums.clear()
        self._group.close()

    def _post(self, channel: Channel, tensor: Tensor) -> None:
        try:
            work = dist.isend(tensor, channel[3], group=self._channels[channel])
        except RuntimeError as error:
            raise self._lost(f"rank {channel[3]} to take what {channel[0]} carries", error) from error
        self._sending.append((work, tensor))

    def _receive(self, channel: Channel, tensor: Tensor) -> Any:
        return dist.irecv(tensor, channel[2], group=self._channels[channel])

    def _lost(self, what: str, error: Exception) -> RankLostError:
        return RankLostError(
            f"rank {self._group.rank} of {self._group.size} waited for {what}, for {self._group.timeout:g} s at "
            f"most: {' '.join(str(error).split())[:200]}. That process has died, hangs, or is too slow."
        )

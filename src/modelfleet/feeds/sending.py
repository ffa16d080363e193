"""Sending batches to a device while it computes."""

from collections.abc import Callable
from dataclasses import replace

from modelfleet.feeds._base import Batch, Sender


def send(sender: Sender, batch: Batch, *, copy: bool = False) -> Callable[[], Batch]:
    """Send a batch of tensors on the host to a device.

    Args:
        sender: Sends to the device.
        batch: The batch, with those for members whose rows have other shapes.
        copy: Never share memory with these tensors.

    Returns:
        A function for the thread that computes with the batch. It returns the batch on the device.
    """
    arriving = [sender.send(one.data, copy=copy) for one in batch.by_shape]

    def receive() -> Batch:
        pairs = zip(batch.by_shape, arriving, strict=True)
        first, *others = [replace(one, data=arrive(), others=()) for one, arrive in pairs]
        return replace(first, others=tuple(others))

    return receive

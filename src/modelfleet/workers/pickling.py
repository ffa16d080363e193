"""Pickles for other processes of this machine: by name where possible, by value for what `__main__` defines.

What is pickled goes from one process to another that it has started, and never to a disk.
"""

import io
import os
import pickle
import threading
from typing import Any

import cloudpickle

from modelfleet.formatting import without_period
from modelfleet.frameworks.conversions import pickle_reduction
from modelfleet.workers.channel import above_standard
from modelfleet.workers.protocol import CannotSendError
from modelfleet.workers.shared_memory import close_descriptors

_attachments = threading.local()
"""`collected`: descriptors of the value being pickled. `received`: descriptors of the value being unpickled."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        return pickle_reduction(value)


class _PicklerByValue(cloudpickle.Pickler):
    """Pickles code along with what others can't import: what a script, a prompt or a function defines."""

    def reducer_override(self, obj: object) -> Any:
        # cloudpickle would read a file and send its contents, which would be a different file there.
        if isinstance(obj, io.IOBase) and not isinstance(obj, io.BytesIO | io.StringIO):
            raise TypeError(f"cannot pickle an open file, {obj!r}")
        reduced = pickle_reduction(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def pickle_value(
    value: object, description: str, pickler: type[pickle.Pickler] | None = None
) -> tuple[bytes, list[memoryview]]:
    """Return a value's pickle, and the arrays that travel beside it.

    Args:
        value: The value to pickle.
        description: Names the value in errors.
        pickler: The pickler to use. By default, values of `__main__` are pickled by value and all others by name.

    Raises:
        CannotSendError: If the value can't be pickled.
    """
    stream, views, descriptors = pickle_with_descriptors(value, description, pickler)
    close_descriptors(descriptors)
    return stream, views


def pickle_with_descriptors(
    value: object, description: str, pickler: type[pickle.Pickler] | None = None
) -> tuple[bytes, list[memoryview], list[int]]:
    """Return a value's pickle, and the arrays and descriptors that travel beside it.

    A worker has a different `__main__`: values of this one are pickled by value, and all others by name.
    """
    for kind in [pickler] if pickler is not None else [_Pickler, _PicklerByValue]:
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        before = getattr(_attachments, "collected", None)
        _attachments.collected = descriptors = []
        try:
            kind(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        except Exception as error:  # a pickle may raise anything
            close_descriptors(descriptors)
            if kind is _Pickler:
                continue
            raise CannotSendError(
                f"{description} can't be sent to a worker process: {type(error).__name__}: "
                f"{without_period(error)}. "
                f"Define classes and functions at the top of a module that can be imported, and leave out what "
                f"belongs to one process alone: locks, open files, generators."
            ) from error
        finally:
            _attachments.collected = before
        written = stream.getvalue()
        if kind is _Pickler and b"__main__" in written:  # every reference contains its module's name
            close_descriptors(descriptors)
            continue
        return written, [buffer.raw() for buffer in buffers], descriptors
    raise AssertionError("the last pickler returns or raises")


def unpickle(stream: bytes | memoryview, buffers: list[memoryview], descriptors: list[int]) -> Any:
    """Return the value of a pickle; `attached_descriptor` finds `descriptors` meanwhile."""
    before = getattr(_attachments, "received", None)
    _attachments.received = descriptors
    try:
        return pickle.loads(stream, buffers=buffers)
    finally:
        _attachments.received = before


def copy_by_pickle(value: object, description: str) -> Any:
    """Return a value as a worker process would get it, on the same arrays."""
    stream, buffers = pickle_value(value, description)
    return pickle.loads(stream, buffers=buffers)


def sendable_error(error: Exception) -> Exception:
    """Return an error if it can be pickled and unpickled; else a RuntimeError with its text."""
    try:
        copy_by_pickle(error, "an error")
    except Exception:  # a pickle may raise anything, when it is written and when it is read
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def attach_descriptor(descriptor: int) -> int:
    """Send a descriptor along with the value being pickled. Return its index for `attached_descriptor`."""
    collected = getattr(_attachments, "collected", None)
    if collected is None:
        raise TypeError("a value with a descriptor can be sent to worker processes only")
    collected.append(above_standard(os.dup(descriptor)))
    return len(collected) - 1


def attached_descriptor(index: int) -> int:
    """Return a descriptor of the value that is being unpickled. It is closed when all is unpickled."""
    return _attachments.received[index]

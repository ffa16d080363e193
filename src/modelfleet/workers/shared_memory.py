"""Memory that processes of one machine share. It has no name, so nothing can be left behind.

Shared memory is known by its descriptor, which is sent once. The memory exists as long as a process has it mapped,
or has a descriptor of it open.
"""

import ctypes
import mmap
import os
import tempfile
from functools import cache

import numpy as np

from modelfleet.devices import host_memory
from modelfleet.formatting import size as size_of
from modelfleet.workers.channel import above_standard
from modelfleet.workers.protocol import NoRoomError

LARGE = 1 << 26  # bytes: from this size on, the free memory is checked first


def create(size: int) -> int:
    """Return the descriptor of new shared memory.

    Raises:
        NoRoomError: If there is not enough memory.
    """
    free = None
    if size >= LARGE:  # if a program takes more than there is, the system kills some process
        memory = host_memory()
        free = None if memory is None else memory.free
        if free is not None and size > free:
            raise _no_room(size, free)
    if hasattr(os, "memfd_create"):
        descriptor = above_standard(os.memfd_create("modelfleet"))
    else:
        with tempfile.TemporaryFile(prefix="modelfleet-") as file:
            descriptor = above_standard(os.dup(file.fileno()))
    try:
        os.ftruncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):
            # Without this, missing memory shows at the first write, as a signal that ends the process.
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise _no_room(size, free) from error
    return descriptor


def map_memory(descriptor: int, size: int) -> memoryview:
    """Return shared memory, mapped as long as anything refers to it. The descriptor can be closed.

    Python's own `mmap` would keep a descriptor open for as long.
    """
    library = _library()
    start = library.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if start in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"shared memory can't be mapped: {os.strerror(number)}")
    return np.asarray(_Mapping(start, size)).data


class _Mapping:
    """Mapped memory. NumPy arrays on it, and their views, keep this object alive."""

    def __init__(self, start: int, size: int) -> None:
        self.__array_interface__ = {"data": (start, False), "shape": (size,), "typestr": "|u1", "version": 3}
        self._unmap, self._range = _library().munmap, (start, size)

    def __del__(self) -> None:
        self._unmap(*self._range)


def close_descriptors(descriptors: list[int]) -> None:
    """Close descriptors that were sent or received, and empty the list."""
    while descriptors:
        os.close(descriptors.pop())


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t),
    )
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


def _no_room(size: int, free: int | None) -> NoRoomError:
    left = "" if free is None else f"; {size_of(free)} is free"
    return NoRoomError(
        f"{size_of(size)} of shared memory is not available{left}. Give the machine or the container more memory "
        f"(`docker run --memory=8g`), or send less at once."
    )

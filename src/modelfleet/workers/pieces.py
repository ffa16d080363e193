"""Pieces of memory that processes of one machine share. They have no name, so that nothing can be left behind.

A piece is known by its descriptor, which is sent once. It is there as long as a process has it mapped, or a
descriptor of it open.
"""

import ctypes
import mmap
import os
import tempfile
from functools import cache
from typing import Any

import numpy as np

from modelfleet.devices import host_memory
from modelfleet.words import size as size_of
from modelfleet.workers._base import NoRoomError
from modelfleet.workers.channel import above_standard

LARGE = 1 << 26  # bytes from which on it is looked up first whether so much is free


def new(size: int) -> int:
    """The descriptor of a new piece; raises `NoRoomError` if there is not so much memory."""
    free = None
    if size >= LARGE:  # else the system, asked for more than it has, would end some process
        memory = host_memory()
        free = None if memory is None else memory.free
        if free is not None and size > free:
            raise _refused(size, free)
    if hasattr(os, "memfd_create"):
        descriptor = above_standard(os.memfd_create("modelfleet"))
    else:
        with tempfile.TemporaryFile(prefix="modelfleet-") as file:
            descriptor = above_standard(os.dup(file.fileno()))
    try:
        os.ftruncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):
            # Else memory that is not there shows when it is written to, by a signal that ends the process.
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise _refused(size, free) from error
    return descriptor


def mapped(descriptor: int, size: int) -> memoryview:
    """A piece's memory, mapped until nobody refers to it any more. The descriptor can be closed.

    Python's own `mmap` would keep a descriptor open for as long.
    """
    library = _library()
    start = library.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if start in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"a piece of shared memory can't be mapped: {os.strerror(number)}")
    return np.asarray(_Mapped(start, size)).data


class _Mapped:
    """Memory at an address, as NumPy takes it up: the array, and whatever lies on it, refers to this object."""

    def __init__(self, start: int, size: int) -> None:
        self.__array_interface__ = {"data": (start, False), "shape": (size,), "typestr": "|u1", "version": 3}
        self._unmap, self._place = _library().munmap, (start, size)

    def __del__(self) -> None:
        self._unmap(*self._place)


def close(descriptors: list[int]) -> None:
    """Close descriptors that were sent, or were received."""
    while descriptors:
        os.close(descriptors.pop())


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t),
    )
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


def _refused(size: int, free: int | None) -> NoRoomError:
    left = "" if free is None else f", {size_of(free)} is free"
    return NoRoomError(
        f"{size_of(size)} of shared memory can't be had{left}. Give the machine or the container more memory "
        f"(`docker run --memory=8g`), or send less at once."
    )

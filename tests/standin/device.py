"""The stand-in accelerator in torch: devices "standin:0" and "standin:1".

`load` registers it. torch calls it in every process that has the folder `autoload` on its path, so that workers
have the device, too.
"""

import ctypes
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.standin.building import library

NAME = "standin"
COUNT = 2
_STREAMS = ctypes.POINTER(ctypes.c_int64)
_LISTENER = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, _STREAMS, ctypes.c_int, _STREAMS
)


@dataclass(frozen=True)
class Told:
    """One thing that the device was asked to do.

    Attributes:
        kind: "op"; a copy: "h2d", "d2h", or "p2p" between devices; what the host waits for: "item", "sync"; an
            event: "record", "wait", "query"; "pinned" for an allocation of pinned memory; "free" for memory that
            is given up.
        text: The name of the operation, or the shape of a copy and whether the host waits for it.
        stream: The stream, by a number that no other device's stream has.
        read: The places in memory that are read, those of pinned memory too; or the number of an event.
        written: The places in memory that are written.
    """

    kind: str
    text: str
    stream: int
    read: Sequence[int]
    written: Sequence[int]

    @property
    def waits(self) -> bool:
        """Return True if the host waits for the device."""
        return self.kind in ("item", "sync") or (self.kind in ("h2d", "d2h") and self.text.endswith("waits"))


@contextmanager
def listening(function: Callable[[Told], None]) -> Iterator[None]:
    """Tell a function of everything that the devices are asked to do within this context."""

    def tell(
        kind: bytes,
        text: bytes,
        stream: int,
        reads: int,
        read: "ctypes._Pointer",
        writes: int,
        written: "ctypes._Pointer",
    ) -> None:
        function(Told(kind.decode(), text.decode(), stream, read[:reads], written[:writes]))

    listener = _LISTENER(tell)
    _kept.append(listener)  # another thread may be within a call when this context ends
    _library().standin_listen(listener)
    try:
        yield
    finally:
        _library().standin_listen(_LISTENER())


@contextmanager
def limited(device: int = 0, *, total: int = 0, largest: int = 0) -> Iterator[None]:
    """Let a device have no more memory than this within this context, in total or in one tensor; 0: no limit."""
    torch.accelerator.empty_cache()
    _library().standin_limit(device, total, largest)
    try:
        yield
    finally:
        _library().standin_limit(device, 0, 0)


def where() -> str:
    """Return the line of modelfleet that is running, for messages."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/modelfleet/" in path:
            return f"{path.rpartition('/modelfleet/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside"


def load() -> None:
    """Register the device in this process, as "standin"."""
    if NAME in _loaded:
        return
    _loaded.append(NAME)
    _library().standin_register()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)


_kept: list[object] = []
_loaded: list[str] = []
_libraries: dict[Path, ctypes.CDLL] = {}


def _library() -> ctypes.CDLL:
    path = library()
    if path not in _libraries:
        opened = ctypes.CDLL(str(path))
        opened.standin_seed.argtypes = [ctypes.c_int, ctypes.c_uint64]
        opened.standin_limit.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]
        opened.standin_generator_bytes.restype = ctypes.c_int64
        opened.standin_listen.argtypes = [_LISTENER]
        for function in (opened.standin_get_state, opened.standin_set_state):
            function.argtypes = [ctypes.c_int, ctypes.c_void_p]
        _libraries[path] = opened
    return _libraries[path]


def _index(device: object = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index  # pyrefly: ignore
    return torch.accelerator.current_device_index() if index is None else index


class _CurrentDevice:
    """Context in which a device is the current one, as `torch.cuda.device`."""

    def __init__(self, device: object) -> None:
        self._device = _index(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._device)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _get_rng_state(device: object = None) -> torch.Tensor:
    state = torch.empty(_library().standin_generator_bytes(), dtype=torch.uint8)
    _library().standin_get_state(_index(device), state.data_ptr())
    return state


def _set_rng_state(state: torch.Tensor, device: object = None) -> None:
    _library().standin_set_state(_index(device), state.contiguous().data_ptr())


def _manual_seed(seed: int) -> None:
    _library().standin_seed(_index(), seed % 2**64)


def _manual_seed_all(seed: int) -> None:
    for index in range(COUNT):
        _library().standin_seed(index, seed % 2**64)


def _module() -> types.ModuleType:
    """Return what torch expects of a device's module, as `torch.cuda` is CUDA's."""
    made = types.ModuleType(f"torch.{NAME}")
    functions: dict[str, object] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: COUNT,
        "current_device": lambda: torch.accelerator.current_device_index(),
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed_all,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "device": _CurrentDevice,
    }
    for name, function in functions.items():
        setattr(made, name, function)
    return made

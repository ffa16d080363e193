"""Draw a member's own random numbers in eager execution: the numbers that it would draw in a fused lane.

    with EagerDraws(seed, step) as draws:
        loss = objective(model, batch)
        loss.backward()
    draws.count  # how many draws there were: 0 if the step needs no EagerDraws

If the steps of a member share a `WordCache`, small draws are computed for many steps at a time:

    cache = WordCache()
    with EagerDraws(seed, step, cache) as draws: ...

Random operations draw from the member's stream only within the context, and only in its thread. torch's own
generator is not touched: a data loader may draw from it at the same time. So the number of the next draw is kept
here. It is saved and restored along with the state of torch's generator (`torch.utils.checkpoint`,
`torch.random.fork_rng`), so that a repeated computation repeats its draws. A model that seeds torch itself
(`torch.manual_seed`) or has a generator of its own draws from that, as it would alone.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from modelfleet.frameworks.torch.random.drawing_kernels import PLAIN_WHERE_DRAWING, draws_nothing
from modelfleet.frameworks.torch.random.operations import (
    DRAW_RULES,
    device_of,
    draw_by_torch,
    has_own_generator,
    is_on_meta,
    is_random,
)
from modelfleet.frameworks.torch.random.streams import BatchRows, Streams
from modelfleet.frameworks.torch.random.threefry import WORDS

MAX_STEPS = 64  # that are computed at a time
MAX_BLOCKS = 16384  # for these steps together; beyond that, the overhead of a call does not matter
MAX_CACHED_DRAWS = 256

DrawKey = tuple[int, torch.device, int, int]
"""Seed, device, number of the draw, and how many blocks it has."""


class WordCache:
    """Words of a member's draws, computed for several steps ahead."""

    def __init__(self) -> None:
        self._kept: dict[DrawKey, tuple[int, Tensor]] = {}

    def words(self, key: DrawKey, step: int, blocks: int, make: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the words of a step's draw. `make` computes them for counters and steps `(step, block)`."""
        known = self._kept.get(key)
        if known is None or not known[0] <= step < known[0] + len(known[1]):
            # A first draw may never be repeated. A repeated one is drawn at every step.
            many = 1 if known is None else max(1, min(MAX_STEPS, MAX_BLOCKS // max(blocks, 1)))
            counters = torch.arange(blocks, dtype=torch.int32).expand(many, blocks)
            steps = torch.arange(step, step + many).to(torch.int32).unsqueeze(1)
            if len(self._kept) >= MAX_CACHED_DRAWS:
                self._kept.clear()
            known = self._kept[key] = step, make(counters, steps)
        first, drawn = known
        return drawn[step - first]


class _NumberedStreams(Streams):
    """Streams of one member and step, with the number of the next draw set from outside."""

    def __init__(
        self, seed: int, step: int, device: torch.device, cache: WordCache, rows: BatchRows | None
    ) -> None:
        super().__init__(torch.tensor(seed, device=device), torch.tensor(step, device=device), rows)
        self._cache_key, self._step_number, self._cache = (seed, device), step, cache

    def at(self, number: int) -> Self:
        """Set the number of the next draw."""
        self._draws = number
        return self

    def _first_words(self, number: int, blocks: int) -> Tensor:
        def make(counters: Tensor, steps: Tensor) -> Tensor:
            first, second, _ = self._key
            device = self._seed.device
            return WORDS(first, second + number, counters.to(device), steps.to(device))

        return self._cache.words((*self._cache_key, number, blocks), self._step_number, blocks, make)


class EagerDraws(TorchDispatchMode):
    """Context in which random operations draw from the stream of one member, for one step.

    Args:
        seed: The member's seed.
        step: How many steps it has taken.
        cache: Words that are computed ahead. By default, none are kept.
        rows: The rows of the batch that are computed here, if they are not all.
        first: The number of the first draw.

    Attributes:
        count: How many draws there were. A repeated draw counts once.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        cache: WordCache | None = None,
        *,
        rows: BatchRows | None = None,
        first: int = 0,
    ) -> None:
        super().__init__()
        self.count = 0
        self._seed, self._step = seed, step
        self._cache = cache or WordCache()
        self._rows, self._first = rows, first
        self._streams: dict[torch.device, _NumberedStreams] = {}
        self._number = first
        self._uses_torch = False  # True if the model has seeded torch's generator, and draws from it
        self._states: dict[int, tuple[Tensor, int]] = {}  # by id: states that were read, and the next draw then

    def __enter__(self) -> Self:
        """Draw from the member's stream from now on."""
        _PATCHES.enter()
        PLAIN_WHERE_DRAWING.enter()
        super().__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        """Draw from torch's generator again."""
        super().__exit__(exc_type, exc_val, exc_tb)
        PLAIN_WHERE_DRAWING.leave()
        _PATCHES.leave()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func) or self._uses_torch or _draws_nothing_of_its_own(func, args, kwargs):
            return func(*args, **kwargs)
        number, self._number = self._number, self._number + 1
        self.count = max(self.count, self._number - self._first)
        device = device_of(args, kwargs)
        if device not in self._streams:
            self._streams[device] = _NumberedStreams(self._seed, self._step, device, self._cache, self._rows)
        streams = self._streams[device].at(number)
        if func in DRAW_RULES:
            return DRAW_RULES[func](streams, *args, **kwargs)
        return draw_by_torch(streams, func, args, kwargs)

    @property
    def may_repeat(self) -> bool:
        """Return True if a state of torch's generator was read, to which a later computation may go back."""
        return bool(self._states)

    def save_position(self, state: Tensor) -> None:
        """Remember the number of the next draw for a state of torch's generator that the model has read."""
        if not self._uses_torch:
            self._states[id(state)] = state, self._number

    def restore_position(self, state: Tensor) -> bool:
        """Continue from a state that was read. Return True if torch's generator must be set to it, too."""
        known, before = self._states.get(id(state)), self._uses_torch
        if known is not None:
            self._number = known[1]
        self._uses_torch = known is None
        return before or self._uses_torch

    def use_torch(self) -> None:
        """Draw from torch's generator from now on: the model has seeded it."""
        self._uses_torch = True


_is_random = cache(is_random)


def _draws_nothing_of_its_own(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return has_own_generator(args, kwargs) or is_on_meta(args, kwargs) or draws_nothing(func, args, kwargs)


class _Patches:
    """Replaces functions of `torch.random` while any `EagerDraws` is active, so that it learns of their calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: dict[tuple[ModuleType, str], Callable[..., Any]] = {}

    def enter(self) -> None:
        """Replace the functions, if they are not replaced yet."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                for name, patch in _PATCHED.items():
                    for module in (torch, torch.random):
                        plain = getattr(module, name)
                        self._before[module, name] = plain
                        setattr(module, name, patch(plain))

    def leave(self) -> None:
        """Put torch's functions back after the last user."""
        with self._lock:
            self._users -= 1
            if not self._users:
                for (module, name), plain in self._before.items():
                    setattr(module, name, plain)


def _active() -> EagerDraws | None:
    """Return the context that this thread is in, by torch's own list, which its backward threads share."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, EagerDraws)), None)


def _get_rng_state(plain: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def get_rng_state() -> Tensor:
        state, draws = plain(), _active()
        if draws is not None:
            draws.save_position(state)
        return state

    return get_rng_state


def _set_rng_state(plain: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    def set_rng_state(new_state: Tensor) -> None:
        draws = _active()
        if draws is None or draws.restore_position(new_state):
            plain(new_state)

    return set_rng_state


def _seeding(plain: Callable[..., Any]) -> Callable[..., Any]:
    def seed(*args: Any, **kwargs: Any) -> Any:
        draws = _active()
        if draws is not None:
            draws.use_torch()
        return plain(*args, **kwargs)

    return seed


_PATCHED = {
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": _seeding,
    "seed": _seeding,
}
_PATCHES = _Patches()


@dataclass
class DrawRecord:
    """Record of whether a model's last step drew random numbers.

    Attributes:
        draws: True if it did.
        state: The state of torch's generator after that step.
    """

    draws: bool = True
    state: bytes = b""


class DrawsIfNeeded:
    """Context of one step that draws the member's own random numbers only if it needs any.

    After a step without draws, the next one is assumed to have none either. If torch's generator has advanced
    since then, through the model or through other code, the next step uses `EagerDraws` again.
    """

    def __init__(self, record: DrawRecord, seed: int, step: int, cache: WordCache, device: torch.device) -> None:
        self._record, self._device = record, device
        self._draws = EagerDraws(seed, step, cache) if record.draws else None

    def __enter__(self) -> None:
        if self._draws is not None:
            self._draws.__enter__()

    def __exit__(self, *error: Any) -> None:
        record = self._record
        if self._draws is not None:
            self._draws.__exit__(*error)
            record.draws, record.state = self._draws.count > 0, _torch_state(self._device)
        else:
            record.draws = record.state != _torch_state(self._device)


def _torch_state(device: torch.device) -> bytes:
    """Return the states of the generators that a model on a device may draw from."""
    state = torch.get_rng_state().numpy().tobytes()
    if device.type != "cpu":
        state += torch.get_device_module(device).get_rng_state(device).numpy().tobytes()
    return state

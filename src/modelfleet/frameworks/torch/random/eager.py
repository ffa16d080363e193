"""A member's own random numbers in plain execution: the numbers that it would draw in a fused lane.

    with EagerDraws(seed, step) as draws:
        loss = objective(model, batch)
        loss.backward()
    draws.count  # how many draws there were: 0 if the step needs no EagerDraws

Give the same `WordCache` to the steps of one member, and small draws are worked out for many steps at a time:

    ahead = WordCache()
    with EagerDraws(seed, step, ahead) as draws: ...

Only within the context, and only in its thread, random operations draw from the member's stream. torch's own
generator is left as it is, for the data loader that may draw from it meanwhile. So the number of a draw is kept
here. It goes with the state of torch's generator where that is read and set again (`torch.utils.checkpoint`,
`torch.random.fork_rng`): what is computed again draws the same again. A model that seeds torch itself
(`torch.manual_seed`), or brings a generator along, draws from that, as it would alone.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from modelfleet.frameworks.torch.random.operations import (
    RULES,
    device_of,
    is_random,
    on_meta,
    own_generator,
    seeded,
)
from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.frameworks.torch.random.threefry import threefry

MOST_STEPS = 64  # worked out at a time
MOST_BLOCKS = 16384  # and for all of them together: beyond, a call's own cost does not matter
MOST_KEPT = 256  # draws


class WordCache:
    """The words of a member's draws, for the steps to come."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[int, tuple[Tensor, Tensor]]] = {}

    def words(
        self, key: Any, step: int, blocks: int, make: Callable[[Tensor, Tensor], Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the words of a step's draw; `make` gives them for counters `(step, block)`."""
        known = self._kept.get(key)
        if known is None or not known[0] <= step < known[0] + len(known[1][0]):
            # What was drawn once may never be drawn again; what is drawn twice is drawn at every step.
            many = 1 if known is None else max(1, min(MOST_STEPS, MOST_BLOCKS // max(blocks, 1)))
            counters = torch.arange(blocks, dtype=torch.int32).expand(many, blocks)
            steps = torch.arange(step, step + many).to(torch.int32).unsqueeze(1)
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            known = self._kept[key] = step, make(counters, steps)
        first, (left, right) = known
        return left[step - first], right[step - first]


class _Numbered(Streams):
    """A member's streams of one step, where each draw is told its number."""

    def __init__(self, seed: int, step: int, device: torch.device, ahead: WordCache) -> None:
        super().__init__(torch.tensor(seed, device=device), torch.tensor(step, device=device))
        self._key, self._at, self._ahead = (seed, device), step, ahead

    def at(self, number: int) -> Self:
        """Make this the number of the next draw."""
        self._draws = number
        return self

    def _first(self, number: int, blocks: int) -> tuple[Tensor, Tensor]:
        def make(counters: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
            first, second, _ = self._words
            device = self._seed.device
            return threefry(first, second + number, counters.to(device), steps.to(device))

        return self._ahead.words((*self._key, number, blocks), self._at, blocks, make)


class EagerDraws(TorchDispatchMode):
    """Within this context random operations draw from the stream of one member, for one step."""

    def __init__(self, seed: int, step: int, ahead: WordCache | None = None) -> None:
        super().__init__()
        self.count = 0
        """How many draws there were; one that is computed again counts once."""
        self._seed, self._step = seed, step
        self._ahead = ahead or WordCache()
        self._streams: dict[torch.device, _Numbered] = {}
        self._number = 0
        self._theirs = False  # whether the model has seeded torch's generator, and draws from it
        self._states: dict[int, tuple[Tensor, int]] = {}  # those that were read, by identity

    def __enter__(self) -> Self:
        """Draw from the member's stream from now on."""
        _WATCH.enter()
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        """Draw from torch's generator again."""
        super().__exit__(exc_type, exc_val, exc_tb)
        _WATCH.leave()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func) or self._theirs or own_generator(args, kwargs) or on_meta(args, kwargs):
            return func(*args, **kwargs)
        number, self._number = self._number, self._number + 1
        self.count = max(self.count, self._number)
        streams = self._stream(device_of(args, kwargs)).at(number)
        if func in RULES:
            return RULES[func](streams, *args, **kwargs)
        return seeded(streams, func, args, kwargs)

    def read(self, state: Tensor) -> None:
        """Note that the model has read the generator's state: with it goes the number of the next draw."""
        if not self._theirs:
            self._states[id(state)] = state, self._number

    def set(self, state: Tensor) -> bool:
        """Go on as after a state that was read; whether torch's generator must be set, too."""
        known, before = self._states.get(id(state)), self._theirs
        if known is not None:
            self._number = known[1]
        self._theirs = known is None
        return before or self._theirs

    def seeded(self) -> None:
        """Note that the model has seeded torch's generator."""
        self._theirs = True

    def _stream(self, device: torch.device) -> _Numbered:
        if device not in self._streams:
            self._streams[device] = _Numbered(self._seed, self._step, device, self._ahead)
        return self._streams[device]


_draws = cache(is_random)


class _Watch:
    """Tells the active `EagerDraws` what its model does to torch's generator, as long as there is any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: dict[tuple[Any, str], Any] = {}

    def enter(self) -> None:
        """Watch, if nobody does."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                for name, watched in _WATCHED.items():
                    for module in (torch, torch.random):
                        plain = getattr(module, name)
                        self._before[module, name] = plain
                        setattr(module, name, watched(plain))

    def leave(self) -> None:
        """Stop watching after the last."""
        with self._lock:
            self._users -= 1
            if not self._users:
                for (module, name), plain in self._before.items():
                    setattr(module, name, plain)


def _active() -> EagerDraws | None:
    """The context that this thread is in; by torch's own list, which its threads for backward share."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, EagerDraws)), None)


def _get_rng_state(plain: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def get_rng_state() -> Tensor:
        state, draws = plain(), _active()
        if draws is not None:
            draws.read(state)
        return state

    return get_rng_state


def _set_rng_state(plain: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    def set_rng_state(new_state: Tensor) -> None:
        draws = _active()
        if draws is None or draws.set(new_state):
            plain(new_state)

    return set_rng_state


def _seeding(plain: Callable[..., Any]) -> Callable[..., Any]:
    def seed(*args: Any, **kwargs: Any) -> Any:
        draws = _active()
        if draws is not None:
            draws.seeded()
        return plain(*args, **kwargs)

    return seed


_WATCHED = {
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": _seeding,
    "seed": _seeding,
}
_WATCH = _Watch()


@dataclass
class DrawRecord:
    """Whether a model draws random numbers, by what it did last."""

    draws: bool = True
    state: bytes = b""
    """Of torch's generator after the last step that drew nothing."""


class DrawsIfNeeded:
    """The context of one step or look, with the member's own random numbers only if it needs any.

    A step that drew nothing is believed to be followed by others that draw nothing. If torch's generator has moved
    meanwhile, by a draw of the model or of somebody else, the next step is watched again.
    """

    def __init__(self, habit: DrawRecord, seed: int, step: int, ahead: WordCache) -> None:
        self._habit = habit
        self._draws = EagerDraws(seed, step, ahead) if habit.draws else None

    def __enter__(self) -> None:
        if self._draws is not None:
            self._draws.__enter__()

    def __exit__(self, *error: Any) -> None:
        habit = self._habit
        if self._draws is not None:
            self._draws.__exit__(*error)
            habit.draws, habit.state = self._draws.count > 0, _generator()
        else:
            habit.draws = habit.state != _generator()


def _generator() -> bytes:
    return torch.get_rng_state().numpy().tobytes()

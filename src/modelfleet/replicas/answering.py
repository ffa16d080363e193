"""Answers to a batch, in a worker: outputs for the rows that are in order, and an error for each that is not."""

import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.protocol import Replica
from modelfleet.joining import alike, joined
from modelfleet.trees import leaves, map_tree
from modelfleet.workers.pickling import sendable_error

SEARCH = 0.1  # seconds that a search for bad rows takes others' time; what is left then takes turns with others
LONGEST = 4000  # characters of a traceback


@dataclass(frozen=True)
class Reply:
    """What became of a batch. Every row is in one of the parts, has an error, or is left."""

    parts: tuple[tuple[int, int, Any], ...] = ()
    """(start, stop, outputs of these rows: a tree of NumPy arrays `(row, …)`), in the order of the rows."""
    errors: Mapping[int, Exception] = field(default_factory=dict)
    """What the model raised, by row. Equal errors are one object."""
    left: tuple[tuple[int, int], ...] = ()
    """Rows, (start, stop), that are to be asked again: each span apart from the others."""
    short: int = 0
    """The device had no memory for so many rows at once."""
    error: Exception | None = None
    """Why a model could not be loaded."""
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        """How many rows were answered."""
        return sum(stop - start for start, stop, _ in self.parts)


class Answering:
    """Answers batches by a replica, `size` rows at a time.

    When the model raises, halves are tried until each bad row is found, as others' rows may be in the batch. With
    `whole`, as for models whose rows depend on each other, a batch is never cut or padded, and an error is that of
    all its rows.
    """

    def __init__(self, replica: Replica, size: int, whole: bool) -> None:
        self.replica = replica
        self._size, self._whole = size, whole
        self._bad = 0  # rows found to be bad one after the other, without a good one in between

    def answered(self, rows: Any) -> Reply:
        """The outputs for rows of one batch or of several."""
        begun = time.perf_counter()
        total = len(leaves(rows)[0])
        size = total if self._whole else self._size
        # The next is the last.
        waiting = [(start, min(start + size, total)) for start in reversed(range(0, total, size))]
        parts: list[tuple[int, int, Any]] = []
        errors: dict[int, Exception] = {}
        known: dict[tuple[type, str], Exception] = {}
        short, until = 0, float("inf")
        while waiting and time.perf_counter() < until:
            start, stop = waiting.pop()
            try:
                outputs = self._outputs(map_tree(lambda leaf, a=start, b=stop: leaf[a:b], rows))
            except Exception as error:  # a model may raise anything
                if self.replica.broken(error):
                    raise
                until = min(until, time.perf_counter() + SEARCH)
                if self._whole or stop - start == 1:
                    errors.update(dict.fromkeys(range(start, stop), _once(error, known)))
                    self._bad += stop - start
                elif self.replica.out_of_memory(error):
                    waiting.append((start, stop))
                    short = stop - start
                    break
                else:
                    waiting.extend(self._smaller(start, stop))
            else:
                parts.append((start, stop, outputs))
                if until < float("inf"):
                    self._bad = 0
        if len(parts) > 1 and not errors and not waiting and alike([outputs for _, _, outputs in parts]):
            with suppress(MemoryError):  # then they go as they are
                parts = [(0, total, joined([outputs for _, _, outputs in parts]))]  # less to send
        return Reply(tuple(parts), errors, tuple(reversed(waiting)), short, seconds=time.perf_counter() - begun)

    def _smaller(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What to try instead of rows that raised, the last first."""
        if self._bad >= self._size:  # a whole batch was: halves would only take longer
            return [(row, row + 1) for row in reversed(range(start, stop))]
        middle = (start + stop + 1) // 2
        return [(middle, stop), (start, middle)]

    def _outputs(self, batch: Any) -> Any:
        """The outputs for one batch, padded to a power of two or to a full batch where every size is compiled."""
        count = len(leaves(batch)[0])
        pads = self.replica.pads and not self._whole
        size = min(self._size, 1 << (count - 1).bit_length()) if pads else count
        outputs = self.replica(map_tree(lambda leaf: _padded(leaf, size), batch))
        _check(outputs, size)
        return outputs if size == count else map_tree(lambda leaf: leaf[:count], outputs)


def portable_error(error: Exception) -> Exception:
    """An error to be kept: its traceback as text, as the real one keeps all that the model has computed with."""
    text = "".join(traceback.format_exception(error))
    kept = sendable_error(error)
    _forget_tracebacks(kept)
    kept.add_note(f"In the replica:\n{text[-LONGEST:]}")
    return kept


def _once(error: Exception, known: dict[tuple[type, str], Exception]) -> Exception:
    """An error to be kept: of equal ones the first. One of a batch has its traceback, however many there are."""
    key = type(error), str(error)
    if key not in known:
        if known:
            known[key] = sendable_error(error)
            _forget_tracebacks(known[key])
        else:
            known[key] = portable_error(error)
    return known[key]


def _forget_tracebacks(error: BaseException) -> None:
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        seen.add(id(one))
        one.__traceback__ = None
        waiting.extend(e for e in (one.__cause__, one.__context__) if e is not None and id(e) not in seen)


def _check(outputs: Any, count: int) -> None:
    found = leaves(outputs)
    if not found:
        raise InputError(f"the model gave {outputs!r} for {count} rows; expected arrays, one answer per row.")
    for leaf in found:
        if leaf.ndim == 0 or len(leaf) != count:
            raise InputError(
                f"the model gave {leaf.shape} for {count} rows; expected one answer per row, ({count}, …). "
                f"Give a model whose outputs have the rows first, as its inputs do."
            )


def _padded(leaf: np.ndarray, size: int) -> np.ndarray:
    # By copies of a real row: they are never looked at, and bring no NaN or index of their own.
    return leaf if len(leaf) == size else np.concatenate([leaf, np.repeat(leaf[-1:], size - len(leaf), axis=0)])

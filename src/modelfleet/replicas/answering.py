"""Answers to a batch, in a worker: outputs for the good rows, and an error for each bad one."""

import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.adapter_protocol import Replica
from modelfleet.joining import alike, joined
from modelfleet.replicas.rows import Part
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tree
from modelfleet.workers.pickling import sendable_error

SEARCH_SECONDS = 0.1  # of searching for bad rows; the rest of the search takes turns with other users' rows
MAX_TRACEBACK = 4000  # characters


@dataclass(frozen=True)
class Reply:
    """Outcome of a batch. Every row is in one of the parts, has an error, or is left."""

    parts: tuple[Part, ...] = ()
    """Outputs as trees of NumPy arrays `(row, …)`, in the order of the rows."""
    errors: Mapping[int, Exception] = field(default_factory=dict)
    """Errors that the model raised, by row. Equal errors are one object."""
    left: tuple[tuple[int, int], ...] = ()
    """Rows, (start, stop), to be tried again: each span apart from the others."""
    too_many_rows: int = 0
    """Number of rows for which the device had no memory; 0 if it had."""
    error: Exception | None = None
    """Error of a model that could not be loaded."""
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        """Number of rows that were answered."""
        return sum(stop - start for start, stop, _ in self.parts)


class Answerer:
    """Answers batches by a replica, `size` rows at a time.

    When the model raises, halves are tried until each bad row is found, as other users' rows may be in the batch.
    With `whole`, for models whose rows depend on each other, a batch is never cut or padded, and all of its
    rows share an error.
    """

    def __init__(self, replica: Replica, size: int, *, whole: bool) -> None:
        self.replica = replica
        self._size, self._whole = size, whole
        self._bad_in_a_row = 0

    def answer(self, rows: Tree) -> Reply:
        """Return the outputs for the rows of one or several batches."""
        begun = time.perf_counter()
        total = len(leaves(rows)[0])
        size = total if self._whole else self._size
        # A stack: the next span is the last one.
        waiting = [(start, min(start + size, total)) for start in reversed(range(0, total, size))]
        parts: list[Part] = []
        errors: dict[int, Exception] = {}
        distinct: dict[tuple[type, str], Exception] = {}
        too_many_rows, until = 0, float("inf")
        while waiting and time.perf_counter() < until:
            start, stop = waiting.pop()
            try:
                outputs = self._outputs(map_tree(lambda leaf, a=start, b=stop: leaf[a:b], rows))
            except Exception as error:  # a model may raise anything
                if self.replica.broken(error):
                    raise
                until = min(until, time.perf_counter() + SEARCH_SECONDS)
                if self._whole or stop - start == 1:
                    errors.update(dict.fromkeys(range(start, stop), _deduplicated(error, distinct)))
                    self._bad_in_a_row += stop - start
                elif self.replica.out_of_memory(error):
                    waiting.append((start, stop))
                    too_many_rows = stop - start
                    break
                else:
                    waiting.extend(self._smaller_spans(start, stop))
            else:
                parts.append((start, stop, outputs))
                if until < float("inf"):
                    self._bad_in_a_row = 0
        if len(parts) > 1 and not errors and not waiting and alike([outputs for _, _, outputs in parts]):
            with suppress(MemoryError):  # then they are sent as they are
                parts = [(0, total, joined([outputs for _, _, outputs in parts]))]  # less to send
        seconds = time.perf_counter() - begun
        return Reply(tuple(parts), errors, tuple(reversed(waiting)), too_many_rows, seconds=seconds)

    def _smaller_spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return what to try instead of rows that raised, the last span first."""
        if self._bad_in_a_row >= self._size:  # after a whole batch of bad rows, halves would only take longer
            return [(row, row + 1) for row in reversed(range(start, stop))]
        middle = (start + stop + 1) // 2
        return [(middle, stop), (start, middle)]

    def _outputs(self, batch: Tree) -> Tree:
        """Return the outputs for one batch. If every size has to be compiled, rows are padded to a few sizes."""
        count = len(leaves(batch)[0])
        pads = self.replica.pads and not self._whole
        size = min(self._size, 1 << (count - 1).bit_length()) if pads else count
        outputs = self.replica(map_tree(lambda leaf: _padded(leaf, size), batch))
        _check_outputs(outputs, size)
        return outputs if size == count else map_tree(lambda leaf: leaf[:count], outputs)


def portable_error(error: Exception) -> Exception:
    """Return an error with its traceback as text: the real one would keep all tensors of the model's call."""
    text = "".join(traceback.format_exception(error))
    kept = sendable_error(error)
    _drop_tracebacks(kept)
    kept.add_note(f"In the replica:\n{text[-MAX_TRACEBACK:]}")
    return kept


def _deduplicated(error: Exception, distinct: dict[tuple[type, str], Exception]) -> Exception:
    """Return the first of equal errors. Only the first error of a batch has its traceback."""
    key = type(error), str(error)
    if key not in distinct:
        if distinct:
            distinct[key] = sendable_error(error)
            _drop_tracebacks(distinct[key])
        else:
            distinct[key] = portable_error(error)
    return distinct[key]


def _drop_tracebacks(error: BaseException) -> None:
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        seen.add(id(one))
        one.__traceback__ = None
        waiting.extend(e for e in (one.__cause__, one.__context__) if e is not None and id(e) not in seen)


def _check_outputs(outputs: Tree, count: int) -> None:
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
    # With copies of a real row: their outputs are dropped, and they can't add a NaN or a bad index.
    return leaf if len(leaf) == size else np.concatenate([leaf, np.repeat(leaf[-1:], size - len(leaf), axis=0)])

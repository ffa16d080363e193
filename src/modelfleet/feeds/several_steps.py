"""Several steps in one batch."""

from collections.abc import Generator, Iterator, Sequence

from modelfleet.feeds._base import ArrayOperations, Batch
from modelfleet.feeds.checking import row_spec
from modelfleet.trees import map_trees


def group_steps(batches: Iterator[Batch], several: int, arrays: ArrayOperations) -> Generator[Batch, None, None]:
    """Yield the same steps with up to `several` in a batch."""
    held: list[Batch] = []
    raised: Exception | None = None
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # raised below, so that what was read before it is not lost
            batch, raised = None, error
        if held and (batch is None or not (batch.full and _same_shape(held[0], batch))):
            yield _stack_steps(held, arrays)
            held = []
        if raised is not None:
            raise raised
        if batch is None:
            return
        if not batch.full:
            yield batch
            continue
        held.append(batch)
        if len(held) == several:
            yield _stack_steps(held, arrays)
            held = []


def _same_shape(a: Batch, b: Batch) -> bool:
    return a.size == b.size and row_spec(a.data) == row_spec(b.data)


def _stack_steps(batches: Sequence[Batch], arrays: ArrayOperations) -> Batch:
    first = batches[0]
    if len(batches) == 1:
        return first
    data = map_trees(arrays.stack, [batch.data for batch in batches])
    return Batch(data, first.shared, first.counts, len(batches))

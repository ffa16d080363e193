"""Progress bar for `map` and `imap`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from modelfleet.errors import InputError
from modelfleet.formatting import count
from modelfleet.replicas.pool import Replicas
from modelfleet.replicas.reading import Reading

Progress = Literal["auto"] | bool
Show = Callable[[int], None]
"""Updates a progress bar, given how many users have failed."""
ProgressBar = Callable[[Replicas, int, Reading], AbstractContextManager[Show]]
"""Returns a progress bar of the rows of arrays and streams."""


def progress_bar(progress: Progress) -> ProgressBar:
    """Return the progress bar for an option; it may show nothing."""
    if progress not in ("auto", True, False):
        raise InputError(f'progress is {progress!r}, expected "auto", True or False.')

    @contextmanager
    def shown(replicas: Replicas, rows: int, reading: Reading) -> Iterator[Show]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console()
        if not progress or (progress == "auto" and not console.is_interactive):
            yield lambda failed: None
            return
        columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Bar(*columns, TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task("", total=None)

            def show(failed: int) -> None:
                more = reading.rows()
                done = sum(replica.rows for replica in replicas.stats().replicas.values())
                text = f"{count(failed, 'user')} failed" if failed else ""
                bar.update(task, completed=done, total=None if more is None else rows + more, description=text)

            yield show

    return shown

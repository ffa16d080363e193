"""Command line: `modelfleet demo | inspect | doctor | bench`."""

import os
import subprocess
import sys
from json import dumps
from pathlib import Path
from typing import NoReturn

from cyclopts import App

from modelfleet import __version__
from modelfleet.errors import FleetError

app = App(
    name="modelfleet",
    version=__version__,
    help="Run many models on few devices, each with the numbers it would have had alone.",
)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; a `FleetError` becomes one line on stderr and exit code 1."""
    try:
        app(sys.argv[1:] if arguments is None else arguments)
    except FleetError as error:
        fail(str(error))
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        sys.stderr.close()
        sys.exit(1)


def fail(message: str) -> NoReturn:
    """Print what is wrong on stderr and exit with code 1."""
    print(f"modelfleet: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)


@app.command
def demo(*, epochs: int = 20, alone: int = 4, picture: Path = Path("modelfleet-demo.png")) -> None:
    """Train 64 variants of a network on one device, and a few of them one by one to compare.

    Parameters
    ----------
    epochs
        How long every variant trains.
    alone
        How many variants are trained one by one, too.
    picture
        Where the picture of all learning curves goes.
    """
    # Before torch is imported, so that its threads sleep while they wait. On a busy machine, spinning threads
    # delay every small operation.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from modelfleet.demo import run

    run(epochs=epochs, alone=alone, picture=picture)


@app.command
def inspect(folder: Path) -> None:
    """Show what a saved fleet or a checkpoint holds, without loading it.

    Parameters
    ----------
    folder
        What `fleet.save` or a `Checkpoint` wrote.
    """
    from rich.console import Console

    from modelfleet.inspection import describe

    Console().print(describe(folder))


@app.command
def doctor(*, json: bool = False) -> None:
    """Show what is installed, which devices there are with their memory, and what is missing for what.

    Parameters
    ----------
    json
        Print it for a program to read; memory in bytes.
    """
    from rich.console import Console

    from modelfleet.doctor import describe, examine

    report = examine()
    if json:
        print(dumps(report.to_dict(), indent=2))
    else:
        Console().print(describe(report))


@app.command
def bench(*arguments: str) -> None:
    """Measure fused fleets against their peers. Runs in a checkout of the source only.

    Parameters
    ----------
    arguments
        Passed on to `python -m benchmarks`; put `--` before the first.
    """
    for root in (Path.cwd(), Path(__file__).parents[2]):
        if (root / "benchmarks" / "__main__.py").is_file():
            command = [sys.executable, "-m", "benchmarks", *arguments]
            sys.exit(subprocess.run(command, cwd=root, check=False).returncode)
    raise FleetError(
        "the benchmarks are part of the source, not of the installed package. "
        "In a checkout, run: make bench (or python -m benchmarks)."
    )

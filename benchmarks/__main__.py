"""python -m benchmarks [row ...] [--json path] [--quick]."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.contests import CONTESTS
from benchmarks.harness import measure_cold, measure_contest, measure_growth, measure_row
from benchmarks.report import Report, save, show
from benchmarks.rows import ROWS

NAMES = (*ROWS, "cold", "growth", *CONTESTS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="modelfleet against its peers.")
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(NAMES)}; all if none is named")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "latest.json")
    parser.add_argument("--quick", action="store_true", help="a smoke test with tiny counts")
    arguments = parser.parse_args()
    wanted = arguments.rows or NAMES
    if strangers := [name for name in wanted if name not in NAMES]:
        parser.error(f"unknown row {', '.join(strangers)}. Known: {', '.join(NAMES)}.")

    console = Console(log_path=False)
    report = Report(arguments.quick)
    for name, row in ROWS.items():
        if name in wanted:
            report.rows.append((row, measure_row(row, quick=arguments.quick, say=console.log)))
    for name, contest in CONTESTS.items():
        if name in wanted:
            report.rows += measure_contest(contest, quick=arguments.quick, say=console.log)
    if "cold" in wanted:
        report.cold = measure_cold(quick=arguments.quick, say=console.log)
    if "growth" in wanted:
        report.growth = measure_growth(quick=arguments.quick, say=console.log)
    show(report, console)
    save(report, arguments.json)
    console.print(f"Written to {arguments.json}")
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()

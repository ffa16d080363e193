"""python -m benchmarks.chart [results.json] [--to docs/speed.svg]: the README's chart, as measured."""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
OWN, PEER, TEXT = "#d9480f", "#8fa3b8", "#333333"
FLEET = "modelfleet"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=HERE / "results" / "latest.json")
    parser.add_argument("--to", type=Path, default=HERE.parent / "docs" / "speed.svg")
    arguments = parser.parse_args()
    if not arguments.results.exists():
        parser.error(f"there is no {arguments.results}. Run make bench first.")
    results = json.loads(arguments.results.read_text())
    if results["quick"]:
        parser.error(f"{arguments.results} is of a --quick run, which measures nothing. Run make bench.")
    draw(results).savefig(arguments.to)
    print(f"Drawn to {arguments.to}")


def draw(results: dict[str, Any]) -> Figure:
    """A panel of bars for every row in steady state: member-steps per second of modelfleet and of its peers."""
    rows = [row for row in results["rows"] if row["steady"] and not row["case"]]
    columns = min(2, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(10, 0.6 + 1.7 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, row in zip(panels, rows, strict=False):
        _panel(panel, row)
    for panel in panels[len(rows) :]:
        panel.set_visible(False)
    machine = results["machine"]
    figure.suptitle(
        f"Training steps per second, all members together; end-to-end fit, steady state\n"
        f"{machine['cores']} cores of {machine['cpu']}, torch {machine['versions']['torch']}, "
        f"{results['date'][:10]}",
        fontsize=9,
        color=TEXT,
    )
    return figure


def _panel(axes: Axes, row: dict[str, Any]) -> None:
    peers = [peer for peer in row["peers"] if not peer["problem"]][::-1]
    rates = [peer["rate"] for peer in peers]
    names = [peer["peer"] for peer in peers]
    bars = axes.barh(names, rates, color=[OWN if name == FLEET else PEER for name in names], height=0.7)
    labels = [f" {rate:,.0f}{_ratio(peer)}" for rate, peer in zip(rates, peers, strict=True)]
    axes.bar_label(bars, labels, fontsize=7, color=TEXT)
    axes.set_title(row["title"], fontsize=8, loc="left", color=TEXT)
    axes.set_xlim(0, 1.5 * max(rates))
    axes.tick_params(axis="y", length=0, labelsize=7, labelcolor=TEXT)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _ratio(peer: dict[str, Any]) -> str:
    compared = peer["modelfleet_is"]
    return "" if compared is None else f"  (modelfleet: {compared['value']:.3g} ×)"


if __name__ == "__main__":
    main()

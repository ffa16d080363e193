"""python -m benchmarks.timeline [--to docs/timeline.svg]: a measured step of a chain above the planned one."""

import argparse
from pathlib import Path

import matplotlib as mpl
import torch

import modelfleet as mf
from benchmarks.pipelines import BATCH, MICRO_BATCHES, RATE, dataset, stages


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent.parent / "docs" / "timeline.svg")
    parser.add_argument("--quick", action="store_true", help="a smoke test with tiny stages")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draw(train(arguments.quick), arguments.to)
    print(f"Drawn to {arguments.to}")


def train(quick: bool) -> mf.Chain:
    """Train two stages on two CPU devices of one thread each."""
    encoder, head = stages(quick)
    chain = mf.Chain({"encoder": encoder, "head": head}, devices="cpu:0,cpu:1")
    chain.compile("adam", "cross_entropy", lr=RATE)
    chain.fit(dataset(quick), batch_size=BATCH, micro_batches=MICRO_BATCHES, epochs=2, progress=False)
    return chain


def draw(chain: mf.Chain, path: Path) -> None:
    """Write the picture of a chain's last fit."""
    assert chain.last_plan is not None
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "modelfleet"}):
        chain.last_plan.plot().savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()

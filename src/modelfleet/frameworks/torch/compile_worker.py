"""The process that compiles one program: `python -m modelfleet.frameworks.torch.compile_worker FOLDER`."""

import json
import os
import sys
from pathlib import Path

import torch

from modelfleet.frameworks.torch.compiling import compile_source
from modelfleet.frameworks.torch.files import read
from modelfleet.frameworks.torch.tracing import Spec


def main(folder: Path) -> None:
    """Compile what `folder` holds into torch's cache on disk."""
    os.nice(10)  # the training goes first
    constants = folder / "constants.safetensors"
    inputs = [
        Spec(tuple(s["shape"]), tuple(s["stride"]), getattr(torch, s["dtype"]), torch.device(s["device"]))
        for s in json.loads((folder / "inputs.json").read_text())
    ]
    compile_source((folder / "graph.py").read_text(), read(constants) if constants.exists() else {}, inputs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

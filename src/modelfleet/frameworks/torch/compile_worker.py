"""The process that compiles one program: `python -m modelfleet.frameworks.torch.compile_worker FOLDER`."""

import json
import os
import sys
from pathlib import Path

from modelfleet.frameworks.torch.compiling import compile_first
from modelfleet.frameworks.torch.sources import Source


def main(folder: Path) -> None:
    """Compile what `folder` holds into torch's cache on disk, and say which form of it that was."""
    os.nice(10)  # the training goes first
    forms = json.loads((folder / "forms.json").read_text())
    _, form = compile_first([Source.read(folder / name) for name in forms])
    (folder / "done").write_text(form)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Graphs as text: how a traced program goes to the process that compiles it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from modelfleet.frameworks.torch import files
from modelfleet.frameworks.torch.tracing.trace import TensorSpec

ONE_WIDTH, ANY_WIDTH = "one-width", "any-width"


@dataclass(frozen=True)
class GraphSource:
    """A graph as Python text, the constant tensors it refers to, and the shapes of its inputs."""

    form: str
    text: str
    constants: dict[str, Tensor]
    inputs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, graph: fx.GraphModule, inputs: Sequence[TensorSpec], form: str) -> "GraphSource":
        """The source of a traced graph."""
        constants = {
            node.target: getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"
        }
        return cls(form, graph.graph.python_code("self").src, constants, tuple(inputs))

    def function(self) -> Callable[..., Any]:
        """The graph as a function of its inputs."""
        holder = torch.nn.Module()
        for name, tensor in self.constants.items():
            holder.register_buffer(name, tensor)
        scope: dict[str, Any] = {
            "torch": torch,
            "device": torch.device,
            "inf": float("inf"),
            "nan": float("nan"),
            "NoneType": type(None),
        }
        # Text that `of` made from a traced graph, in this process or in the one that started it.
        exec(compile(self.text, "<modelfleet program>", "exec"), scope)
        return lambda *inputs: scope["forward"](holder, *inputs)

    def write(self, folder: Path) -> None:
        """Put it into a folder."""
        folder.mkdir()
        (folder / "graph.py").write_text(self.text)
        (folder / "inputs.json").write_text(json.dumps([describe(spec) for spec in self.inputs]))
        if self.constants:
            files.write(folder / "constants.safetensors", self.constants)

    @classmethod
    def read(cls, folder: Path) -> "GraphSource":
        """Take it from a folder."""
        constants = folder / "constants.safetensors"
        return cls(
            folder.name,
            (folder / "graph.py").read_text(),
            files.read(constants) if constants.exists() else {},
            tuple(_spec(entry) for entry in json.loads((folder / "inputs.json").read_text())),
        )


def describe(spec: TensorSpec) -> dict[str, Any]:
    """A spec in JSON's terms."""
    return {
        "shape": spec.shape,
        "stride": spec.stride,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "device": str(spec.device),
        "stacked": spec.stacked,
    }


def _spec(entry: dict[str, Any]) -> TensorSpec:
    return TensorSpec(
        tuple(entry["shape"]),
        tuple(entry["stride"]),
        getattr(torch, entry["dtype"]),
        torch.device(entry["device"]),
        entry["stacked"],
    )

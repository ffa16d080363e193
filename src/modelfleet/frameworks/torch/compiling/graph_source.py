"""Traced graphs as text, to send them to the process that compiles them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx

from modelfleet.frameworks.torch import files
from modelfleet.frameworks.torch.random.threefry import NOISE, WORDS, noise_by_operations, words_by_operations
from modelfleet.frameworks.torch.tracing.trace import TensorSpec
from modelfleet.types import Json

Form = Literal["one-width", "any-width"]
ONE_WIDTH: Form = "one-width"
ANY_WIDTH: Form = "any-width"


@dataclass(frozen=True)
class GraphSource:
    """Graph as Python text, the constant tensors it refers to, and the shapes of its inputs.

    Constants on an accelerator are its last inputs: a file does not keep their device, and the process that
    compiles the graph need not use the accelerator for them.
    """

    form: Form
    text: str
    constants: dict[str, Tensor]
    inputs: tuple[TensorSpec, ...]
    lifted: tuple[Tensor, ...] = ()
    """Constants that are inputs. Only the process that made the source has them."""

    @classmethod
    def of(cls, graph: fx.GraphModule, inputs: Sequence[TensorSpec], form: Form) -> "GraphSource":
        """Return the source of a traced graph."""
        graph, lifted = _lift_constants(graph)
        constants = {
            node.target: getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"
        }
        specs = (*inputs, *(TensorSpec.of(tensor, False) for tensor in lifted))
        return cls(form, graph.graph.python_code("self").src, constants, specs, tuple(lifted))

    @property
    def on_cpu(self) -> bool:
        """Return True if the program runs on the CPU alone."""
        return all(spec.device.type == "cpu" for spec in self.inputs)

    @property
    def draws(self) -> bool:
        """Return True if the program draws random numbers."""
        return any(f"torch.ops.{operation}(" in self.text for operation in (WORDS, NOISE))

    def function(self) -> Callable[..., Any]:
        """Return the graph as a function of its inputs."""
        holder = torch.nn.Module()
        for name, tensor in self.constants.items():
            holder.register_buffer(name, tensor)
        scope: dict[str, Any] = {
            "torch": torch,
            "device": torch.device,
            "inf": float("inf"),
            "nan": float("nan"),
            "NoneType": type(None),
            words_by_operations.__name__: words_by_operations,
            noise_by_operations.__name__: noise_by_operations,
        }
        # The text is safe to run: `of` made it from a traced graph, in this process or in the one that started it.
        # A compiler makes one loop of the operations of a draw.
        text = self.text.replace(f"torch.ops.{WORDS}(", f"{words_by_operations.__name__}(")
        text = text.replace(f"torch.ops.{NOISE}(", f"{noise_by_operations.__name__}(")
        exec(compile(text, "<modelfleet program>", "exec"), scope)
        return lambda *inputs: scope["forward"](holder, *inputs)

    def write(self, folder: Path) -> None:
        """Write the source to a new folder."""
        folder.mkdir()
        (folder / "graph.py").write_text(self.text)
        (folder / "inputs.json").write_text(json.dumps([describe(spec) for spec in self.inputs]))
        if self.constants:
            files.write(folder / "constants.safetensors", self.constants)

    @classmethod
    def read(cls, folder: Path) -> "GraphSource":
        """Read the source from a folder that `write` has made."""
        constants = folder / "constants.safetensors"
        return cls(
            ANY_WIDTH if folder.name == ANY_WIDTH else ONE_WIDTH,
            (folder / "graph.py").read_text(),
            files.read(constants) if constants.exists() else {},
            tuple(_spec(entry) for entry in json.loads((folder / "inputs.json").read_text())),
        )


def _lift_constants(module: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return a graph in which constants on an accelerator are inputs after the others, and these constants."""
    found = {
        node.target: constant
        for node in module.graph.nodes
        if node.op == "get_attr" and (constant := getattr(module, node.target)).device.type != "cpu"
    }
    if not found:
        return module, []
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for name in found:
        with graph.inserting_after(last):
            last = graph.placeholder(name)
        for node in [node for node in graph.nodes if node.op == "get_attr" and node.target == name]:
            node.replace_all_uses_with(last)
            graph.erase_node(node)
    return fx.GraphModule(module, graph), list(found.values())


def describe(spec: TensorSpec) -> Json:
    """Return a spec in JSON's types."""
    return {
        "shape": spec.shape,
        "stride": spec.stride,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "device": str(spec.device),
        "stacked": spec.stacked,
    }


def _spec(entry: Json) -> TensorSpec:
    return TensorSpec(
        tuple(entry["shape"]),
        tuple(entry["stride"]),
        getattr(torch, entry["dtype"]),
        torch.device(entry["device"]),
        entry["stacked"],
    )

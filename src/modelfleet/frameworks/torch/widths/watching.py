"""Ways to run a model's Python that see each torch function it calls: recorded, or computed for padded members."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.frameworks.torch.tracing.calls import custom_functions_seen
from modelfleet.frameworks.torch.tracing.recording import Origin, Recording, recording
from modelfleet.frameworks.torch.widths.mode import Columns, OwnNumbers, PaddedMode
from modelfleet.frameworks.torch.widths.padded_calls import Call
from modelfleet.frameworks.torch.widths.rules import RULES
from modelfleet.trees import leaves
from modelfleet.types import State

Run = Callable[..., Any]
Tensors = Mapping[str, Tensor]


class Recorded:
    """Runs a function of a model, and keeps the recording of it."""

    def __init__(self) -> None:
        self.recording: Recording | None = None

    def __call__(self, run: Run, weights: Tensors, buffers: Tensors) -> Run:
        """Return a function that does what `run` does, and is recorded."""

        def recorded(model: Any, *args: Any) -> Any:
            given = {Origin("parameter", name): tensor for name, tensor in weights.items()}
            given |= {Origin("buffer", name): tensor for name, tensor in buffers.items()}
            tensors = [leaf for leaf in leaves(args) if isinstance(leaf, Tensor)]
            given |= {Origin("input", number): tensor for number, tensor in enumerate(tensors)}
            with recording(given) as recorder:
                result = recorder.returned(run(model, *args))
            self.recording = recorder.recording
            return result

        return recorded


@dataclass
class Padding:
    """What the steps of a padded lane need to know: the calls of the Python that runs, and the members' numbers."""

    columns: Columns = field(default_factory=Columns)
    table: Tensor | None = None
    """The columns' numbers `(variant, column)`, as far as they were known when the table was made."""
    calls: Sequence[Call] | None = None
    """Calls of the step that runs now. None for a step that is not mapped over padded members."""

    def numbers(self, state: State) -> dict[str, Tensor] | None:
        """Return the numbers of the members of a state, `(member, …)`, to map over."""
        if self.calls is None:
            return None
        variant = state["own"]["variant"]
        table = self.table
        if table is None:
            dtype = torch.float32 if variant.device.type == "mps" else torch.float64
            return {"variant": variant, "rows": torch.zeros(len(variant), 0, dtype=dtype, device=variant.device)}
        return {"variant": variant, "rows": table.index_select(0, variant)}

    def own(self, numbers: Mapping[str, Tensor]) -> OwnNumbers:
        """Return the numbers of all members, or of the one that is mapped over all."""
        return OwnNumbers(self.columns, numbers["rows"], numbers["variant"])

    def around(self, run: Run, numbers: Mapping[str, Tensor], streams: Streams) -> Run:
        """Return a function that does what `run` does for padded members."""
        calls = self.calls
        assert calls is not None

        def padded(model: Any, *args: Any) -> Any:
            with custom_functions_seen(), PaddedMode(calls, RULES, self.own(numbers), streams):
                return run(model, *args)

        return padded

"""Lanes of TensorFlow's own models: one member each, which predicts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.functional import Definition, FunctionalEngine, Programs, State
from modelfleet.frameworks.tensorflow.backend import TensorFlowBackend
from modelfleet.frameworks.tensorflow.models import call_of
from modelfleet.members import Member


class _Prediction(Definition):
    """Prediction with one member. Its weights stay in its own variables: there is no state to stack."""

    maskable = False

    def __init__(self, member: Member, task: Any) -> None:
        self.task = task
        self._name = member.name
        self._call = call_of(member.model)

    def state(self, member: Member) -> State:
        return {}

    def fresh_metrics(self) -> dict[str, Any]:
        return {}

    def predict(self, state: State, x: Any) -> tuple[Any, State]:
        return self._call(x), {}

    def write_back(self, member: Member, state: State) -> None:
        pass

    def try_out(self, state: State, batch: Any) -> None:
        raise self._refusal()

    def gradients(self, state: State, batch: Any, weights: Any) -> dict[str, Any]:
        raise self._refusal()

    def apply(self, state: State, hyper: Any, found: dict[str, Any]) -> tuple[State, Any, Any]:
        raise self._refusal()

    def evaluate(
        self, state: State, metrics: dict[str, Any], batch: Any, weights: Any
    ) -> tuple[dict[str, Any], State]:
        raise self._refusal()

    def results(self, metrics: dict[str, Any]) -> dict[str, Any]:
        raise self._refusal()

    def _refusal(self) -> InputError:
        return InputError(f"member {self._name!r} can only predict. Give a keras.Model to train or evaluate.")


def make_engine(
    members: Sequence[Member],
    task: Any,
    columns: Mapping[str, np.ndarray],
    device: str,
    *,
    fused: bool,
    programs: Programs | None = None,
) -> FunctionalEngine:
    """Return the engine of a lane of one member, which predicts."""
    definition = programs.definition if programs else _Prediction(members[0], task)
    engine = FunctionalEngine(members, definition, TensorFlowBackend(device), fused=fused, programs=programs)
    engine.steps_per_call = 1
    return engine

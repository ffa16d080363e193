"""Lanes of TensorFlow's own models: one member each, which predicts."""

from modelfleet.errors import InputError
from modelfleet.frameworks.engine import Hyper
from modelfleet.frameworks.functional import Definition, FunctionalEngine, Programs, State
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.frameworks.tensorflow.backend import TensorFlowBackend
from modelfleet.frameworks.tensorflow.models import call_of
from modelfleet.frameworks.tensorflow.task import Task
from modelfleet.members import Member
from modelfleet.types import Arrays, Tensor, Tree


class _Prediction(Definition):
    """Prediction with one member. Its weights stay in its own variables: there is no state to stack."""

    can_mask_rows = False

    def __init__(self, member: Member, task: Task) -> None:
        self.task = task
        self._name = member.name
        self._call = call_of(member.model)

    def state(self, member: Member) -> State:
        return {}

    def fresh_metrics(self) -> Arrays:
        return {}

    def predict(self, state: State, x: Tree) -> tuple[Tree, State]:
        return self._call(x), {}

    def write_back(self, member: Member, state: State) -> None:
        pass

    def try_out(self, state: State, batch: Tree) -> None:
        raise self._refusal()

    def gradients(self, state: State, batch: Tree, weights: Tensor | None) -> dict[str, Tree]:
        raise self._refusal()

    def apply(self, state: State, hyper: Hyper, found: dict[str, Tree]) -> tuple[State, Tensor, Tensor]:
        raise self._refusal()

    def evaluate(
        self, state: State, metrics: dict[str, Tensor], batch: Tree, weights: Tensor | None
    ) -> tuple[dict[str, Tensor], State]:
        raise self._refusal()

    def results(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        raise self._refusal()

    def _refusal(self) -> InputError:
        return InputError(f"member {self._name!r} can only predict. Give a keras.Model to train or evaluate.")


def make_engine(context: LaneContext[Task, Programs]) -> FunctionalEngine:
    """Return the engine of a lane of one member, which predicts."""
    known = context.programs
    definition = known.definition if known else _Prediction(context.members[0], context.task)
    engine = FunctionalEngine(context, definition, TensorFlowBackend(context.device))
    engine.steps_per_call = 1
    return engine

"""Tasks of Keras nodes: from a graph's recipe to an optimizer and a loss for each node.

The models' own `compile` is neither used nor changed: a stage in the middle of a chain has no loss, and the state
of its optimizer belongs to the graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np

from modelfleet.each import per_member
from modelfleet.errors import StrategyError
from modelfleet.fingerprints import fingerprint
from modelfleet.frameworks.errors import NotCompiledError
from modelfleet.frameworks.keras import optimizers
from modelfleet.frameworks.keras.nodes.losses import NodeLoss
from modelfleet.frameworks.keras.nodes.masks import check_output
from modelfleet.frameworks.keras.recipe import check_recipe
from modelfleet.frameworks.recipe import Prepared
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import Kind, LossLike

BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "torch"}


@dataclass(frozen=True, eq=False)
class NodeTask:
    """What a node is prepared for."""

    kind: Kind
    make_optimizer: Callable[[], keras.Optimizer] | None = None
    """Makes the node's optimizer; None unless it trains."""
    loss: NodeLoss | None = None
    """Its loss; None if it has none."""
    summary: str = ""
    """The task as one line for checkpoints. A run can continue only with an equal summary."""
    optimizer_name: str = "no optimizer"
    """Its optimizer with all settings."""

    def values(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the loss and the metrics from their sums over an epoch."""
        assert self.loss is not None
        return self.loss.values(sums)


def compile(recipe: Recipe, members: Sequence[Member]) -> None:
    """Raise InputError if a recipe does not fit a node. The models' own compile is left as it is."""
    check_recipe(recipe)
    for member, task in zip(members, prepare(recipe, members, "evaluate").tasks, strict=True):
        _optimizer(recipe, member)
        if task.loss is not None:
            check_output(member.model, member.name)


def prepare(recipe: Recipe | None, members: Sequence[Member], kind: Kind) -> Prepared[NodeTask]:
    """Return the tasks of nodes. There are no columns: learning rates are among the optimizers' variables.

    Raises:
        StrategyError: Nodes are to be trained on another backend than JAX, or by an optimizer that can't be.
    """
    none: list[None] = [None] * len(members)
    if kind == "predict":
        return Prepared([NodeTask(kind)] * len(members), none)
    if recipe is None:
        raise NotCompiledError(
            f"call compile before {'evaluate' if kind == 'evaluate' else 'fit'}: node {members[0].name!r} needs a "
            f"loss and an optimizer. How the models themselves are compiled does not count."
        )
    backend = keras.backend.backend()
    if kind == "train" and backend != "jax":
        raise StrategyError(
            f"node {members[0].name!r} is a Keras model on {BACKENDS[backend]}, where nodes predict and evaluate, "
            f"but do not train. Set KERAS_BACKEND=jax before Keras is imported; or train the undivided model in "
            f"a Fleet."
        )
    losses = per_member(recipe.loss, [member.name for member in members], "loss")
    tasks = [_task(recipe, member, loss, kind) for member, loss in zip(members, losses, strict=True)]
    return Prepared(tasks, none)


def _task(recipe: Recipe, member: Member, loss: LossLike, kind: Kind) -> NodeTask:
    own = None if loss is None else NodeLoss(loss, recipe.metrics, member.name)
    if kind != "train":
        return NodeTask(kind, None, own)
    optimizer = _shown(_optimizer(recipe, member))
    shown = ["its own loss" if loss is None else _shown(loss), *map(_shown, recipe.metrics)]
    return NodeTask(kind, lambda: _optimizer(recipe, member), own, ", ".join([optimizer, *shown]), optimizer)


def _shown(setting: object) -> str:
    """Return an optimizer, a loss or a metric as text that is the same in every process."""
    if not isinstance(setting, keras.Optimizer | keras.Loss | keras.Metric):
        return fingerprint(setting)
    config = {key: fingerprint(value) for key, value in setting.get_config().items() if key != "name"}
    return f"{type(setting).__name__}({', '.join(f'{key}={value}' for key, value in sorted(config.items()))})"


def _optimizer(recipe: Recipe, member: Member) -> keras.Optimizer:
    """Return a new optimizer for a node."""
    recipe = recipe.only([member.name])
    given = {"optimizer": recipe.optimizer, "schedule": recipe.schedule, **(recipe.hyperparameters or {})}
    own = {key: per_member(value, [member.name], key)[0] for key, value in given.items()}
    found = optimizers.scheduled(own.pop("optimizer"), own.pop("schedule"), own, member.name)
    if optimizers.averages_weights(found):
        raise StrategyError(
            f"node {member.name!r}: its optimizer has use_ema=True, and graphs do not average weights. Leave it "
            f"out."
        )
    if isinstance(found, keras.optimizers.LossScaleOptimizer):
        raise StrategyError(
            f"node {member.name!r}: a LossScaleOptimizer needs one scale for all nodes, which graphs do not have. "
            f"Give the optimizer within it."
        )
    return found

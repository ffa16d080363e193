"""From what `compile` was told, by a fleet or by each model itself, to every member's task."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import keras
import numpy as np

from modelfleet.each import per_member
from modelfleet.errors import InputError, unknown
from modelfleet.fingerprints import fingerprint
from modelfleet.frameworks.keras.optimizers import built
from modelfleet.frameworks.keras.structure import owned_by
from modelfleet.frameworks.keras.values import Opaque, Owned, freeze, show
from modelfleet.members import Member
from modelfleet.recipe import Recipe

OPTIMIZERS = {
    cls.__name__.lower(): cls
    for cls in vars(keras.optimizers).values()
    if isinstance(cls, type) and cls not in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
}
# The names that modelfleet has for a loss, where Keras has another; the model's output is logits.
LOSSES = {
    "cross_entropy": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "bce_with_logits": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    "binary_cross_entropy_with_logits": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    "bce": keras.losses.BinaryCrossentropy,
    "binary_cross_entropy": keras.losses.BinaryCrossentropy,
    "l1": keras.losses.MeanAbsoluteError,
    "huber": keras.losses.Huber,
    "smooth_l1": keras.losses.Huber,
}
METRICS = {
    "r2": lambda: keras.metrics.R2Score(name="r2"),
    "rmse": lambda: keras.metrics.RootMeanSquaredError(name="rmse"),
    "top_5": lambda: keras.metrics.SparseTopKCategoricalAccuracy(5, name="top_5"),
}
# Hyperparameters that Keras calls otherwise.
ALIASES = {"lr": "learning_rate", "eps": "epsilon"}
COMPILE = ("loss_weights", "weighted_metrics")  # for model.compile, not for the optimizer

# What Keras keeps on every optimizer for itself; what is spared from weight decay is told by places.
_BOOKKEEPING = frozenset(
    {"_lock", "name", "built", "_variables", "_trainable_variables", "_tracker", "_trainable_variables_indices"}
    | {"_iterations", "_learning_rate", "_distribution_strategy", "_accumulated_gradients"}
    | {"_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern", "_exclude_from_weight_decay_cache"}
)

_OF_STRINGS = (keras.layers.StringLookup, keras.layers.TextVectorization)

_tasks: WeakValueDictionary[Hashable, "Task"] = WeakValueDictionary()  # as long as anybody has them


@dataclass(frozen=True, eq=False)
class Task:
    """What members have in common: how their models were compiled. One object for all that may be fused."""

    summary: str
    key: Hashable = field(repr=False)
    plain: str | None = None
    """Why a member runs on its own, by the functions of its own `fit`; None: its steps can be had as functions."""


@dataclass(frozen=True)
class Prepared:
    """The task of every member. Learning rates are among the optimizer's variables, one for each."""

    tasks: list[Task]
    columns: dict[str, np.ndarray]
    schedules: list[None]


def compile(recipe: Recipe, members: Sequence[Member]) -> None:
    """Compile every member's model, each with an optimizer of its own; nothing is changed if one can't be."""
    names = [member.name for member in members]
    if recipe.objective is not None:
        raise InputError(
            "compile got an objective, which Keras models do not take. "
            "Override compute_loss in the model's class, or give a loss."
        )
    if recipe.precision != "float32":
        raise InputError(
            f"compile got precision={recipe.precision!r}. A Keras model has its precision from when it is made: "
            f'call keras.config.set_dtype_policy("mixed_bfloat16") before the models are, and leave precision out.'
        )
    given = {ALIASES.get(key, key): value for key, value in (recipe.hyperparameters or {}).items()}
    told = {
        "optimizer": recipe.optimizer,
        "loss": recipe.loss,
        "metrics": recipe.metrics,
        "clip_norm": recipe.clip_norm,
        "schedule": recipe.schedule,
        **given,
    }
    columns = {key: per_member(value, names, key) for key, value in told.items()}
    arguments = [
        _arguments({key: values[row] for key, values in columns.items()}, name) for row, name in enumerate(names)
    ]
    for member, own in zip(members, arguments, strict=True):
        member.model.compile(**own)


def prepare(recipe: Recipe | None, members: Sequence[Member], kind: str) -> Prepared:
    """The tasks of members, from how their models are compiled now. Predicting needs no compile."""
    tasks = []
    for member in members:
        if recipe is not None and not member.model.compiled:  # it has joined since the fleet was compiled
            compile(recipe.only([member.name]), [member])
        if kind != "predict":
            _check_compiled(member, kind)
        if kind == "evaluate" and member.model.optimizer is not None and keras.backend.backend() != "tensorflow":
            built(member.model)  # as Keras's own does
        tasks.append(task_of(member.model))
    return Prepared(tasks, {}, [None] * len(tasks))


def _check_compiled(member: Member, kind: str) -> None:
    model, name = member.model, member.name
    if not model.compiled or (kind == "train" and model.optimizer is None):
        missing = "optimizer" if model.compiled else "optimizer and its loss"
        raise InputError(
            f"member {name!r} is not compiled: it needs to know its {missing}. "
            f"Call model.compile(...) on it, or fleet.compile(...) for all members."
        )


def _plain(model: Any) -> str | None:
    """Why a model's steps are no functions of its variables, as far as can be told before the first batch."""
    for step in ("train_step", "test_step", "predict_step", "make_train_function", "make_test_function"):
        if getattr(type(model), step) is not getattr(keras.Model, step) or step in vars(model):
            return f"{type(model).__name__} overrides {step}"
    if model.compiled and model.run_eagerly:
        return "it was compiled with run_eagerly=True"
    strings = any(getattr(tensor, "dtype", None) == "string" for tensor in keras.tree.flatten(_inputs(model)))
    if strings or any(isinstance(layer, _OF_STRINGS) for layer in model._flatten_layers()):
        return "its inputs are strings"
    if any(getattr(layer, "stateful", False) is True for layer in model._flatten_layers()):
        return "it has a stateful layer"
    optimizer = model.optimizer if model.compiled else None
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "use_ema", False):
        return "its optimizer has use_ema=True"
    if getattr(inner, "gradient_accumulation_steps", None) and keras.backend.backend() != "jax":
        return "its optimizer has gradient_accumulation_steps"
    return None


def _inputs(model: Any) -> Any:
    """Return what a model's inputs were declared as; nothing for a class of one's own, which declares none."""
    try:
        return model.inputs or []
    except (AttributeError, ValueError):
        return []


def task_of(model: keras.Model) -> Task:
    """The one task of all models that are compiled like this one; of its own if it runs on its own."""
    plain = _plain(model)
    if plain is not None:
        key = plain, Opaque(model), model.compiled and id(model._compile_config)
        return _known(key, lambda: ", ".join([plain, *_losses(model)]), plain)
    if not model.compiled:
        return _known(("predict",), lambda: "predict")
    told = dict(model._compile_config.config)
    owned = owned_by(model)
    parts = {key: freeze(told[key], owned) for key in ("loss", "loss_weights", "metrics", "weighted_metrics")}
    parts["optimizer"] = optimizer_key(model.optimizer, model.trainable_variables, owned)

    def summary() -> str:
        shown = [f"{key} {show(value)}" for key, value in parts.items() if value != freeze(None)]
        return ", ".join([*shown, *_losses(model)])

    return _known(tuple(parts.items()), summary)


def _known(key: Hashable, summary: Callable[[], str], plain: str | None = None) -> Task:
    found = _tasks.get(key)
    return _tasks.setdefault(key, Task(summary(), key, plain)) if found is None else found


def _losses(model: keras.Model) -> list[str]:
    """What tells a model's losses from edited ones of the same names, where they are a person's own."""
    if not model.compiled:
        return []
    found = []
    for loss in keras.tree.flatten(model._compile_config.config["loss"]):
        kind = type(loss)
        if callable(loss) and not str(getattr(loss, "__module__", kind.__module__)).startswith("keras"):
            found.append(
                fingerprint([loss, getattr(kind, "call", None) if isinstance(loss, keras.Loss) else None])
            )
    if type(model).compute_loss is not keras.Model.compute_loss:
        found.append(fingerprint(type(model).compute_loss))
    return found


def optimizer_key(optimizer: Any, trained: Sequence[Any], owned: Owned | None = None) -> Hashable:
    """An optimizer without its learning rate, unless that is a schedule: then it goes by the optimizer's steps.

    By its attributes, not its config: a class of one's own need not tell all there.
    """
    if optimizer is None:
        return freeze(None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    variables = {id(variable) for variable in inner.variables}
    config: dict[str, Any] = {}
    for name, value in vars(inner).items():
        if name in _BOOKKEEPING or name.startswith("_self_"):
            continue
        slots = isinstance(value, list) and all(id(item) in variables for item in value)
        if not slots and id(value) not in variables:
            config[name] = value
    if not isinstance(inner._learning_rate, keras.Variable):
        config["learning_rate"] = inner._learning_rate
    excluded = getattr(inner, "_exclude_from_weight_decay", None) or set()
    spared = [index for index, v in enumerate(trained) if inner._var_key(v) in excluded]
    pattern = getattr(inner, "_exclude_from_weight_decay_pattern", None)
    config["spared from weight decay"] = [spared, pattern and pattern.pattern]
    if inner is not optimizer:
        config["growth steps of the loss scale"] = optimizer.dynamic_growth_steps
    return type(inner), freeze(config, owned)


def _arguments(told: dict[str, Any], name: str) -> dict[str, Any]:
    """What one member's `model.compile` is called with."""
    found = {key: told.pop(key) for key in COMPILE if key in told}
    chosen, loss, metrics = told.pop("optimizer"), told.pop("loss"), told.pop("metrics")
    clip_norm, schedule = told.pop("clip_norm"), told.pop("schedule")
    if clip_norm is not None:
        told["global_clipnorm"] = clip_norm
    if schedule is not None:
        if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            raise InputError(
                f"member {name!r}: schedule is {schedule!r}. Give a LearningRateSchedule of "
                f"keras.optimizers.schedules, or keras.callbacks.LearningRateScheduler among the callbacks of fit."
            )
        if "learning_rate" in told:
            raise InputError(f"member {name!r} got both a schedule and lr. Give the rate to the schedule.")
        told["learning_rate"] = schedule
    found["optimizer"] = _optimizer(chosen, told, name)
    found["loss"] = _named(loss, LOSSES)
    found["metrics"] = _metrics(metrics, loss) or None
    if found.get("weighted_metrics"):
        found["weighted_metrics"] = _metrics(found["weighted_metrics"], loss)
    return found


def _optimizer(chosen: Any, told: dict[str, Any], name: str) -> Any:
    if "betas" in told:
        told["beta_1"], told["beta_2"] = told.pop("betas")
    rate = told.get("learning_rate")
    if isinstance(rate, int | float | np.number) and not isinstance(rate, bool):
        told["learning_rate"] = float(rate)
        if not 0 <= told["learning_rate"] < float("inf"):
            raise InputError(f"lr of member {name!r} is {rate!r}; expected a number of at least 0.")
    config: Mapping[str, Any] = {}
    if isinstance(chosen, keras.optimizers.Optimizer):
        kind, config = type(chosen), chosen.get_config()
        if not isinstance(chosen._learning_rate, keras.Variable):
            config = {**config, "learning_rate": chosen._learning_rate}  # a schedule, as it is
        config.pop("name", None)
    elif isinstance(chosen, type) and issubclass(chosen, keras.optimizers.Optimizer):
        kind = chosen
    elif isinstance(chosen, str) and chosen.lower().replace("_", "") in OPTIMIZERS:
        kind = OPTIMIZERS[chosen.lower().replace("_", "")]
    elif isinstance(chosen, str):
        raise unknown("optimizer", chosen, OPTIMIZERS)
    else:
        raise InputError(
            f"the optimizer of member {name!r} is {chosen!r}. Give a name, as in 'adam', or an optimizer of Keras."
        )
    try:
        return kind(**{**config, **told})
    except (TypeError, ValueError) as error:
        settings = ", ".join(f"{key}={value!r}" for key, value in told.items())
        raise InputError(f"member {name!r}: {kind.__name__}({settings}) gave {error}") from error


def _named(loss: Any, known: Mapping[str, Any]) -> Any:
    """A loss, or a nest of them for several outputs, with modelfleet's names as Keras's objects."""
    if isinstance(loss, Mapping):
        return {key: _named(value, known) for key, value in loss.items()}
    if isinstance(loss, list | tuple):
        return [_named(value, known) for value in loss]
    return known[loss]() if isinstance(loss, str) and loss in known else loss


def _metrics(metrics: Any, loss: Any) -> Any:
    """Metrics of a member's own: objects hold what they have counted."""
    if isinstance(metrics, Mapping):
        return {key: _metrics(value, loss) for key, value in metrics.items()}
    if isinstance(metrics, list | tuple):
        return [_metrics(value, loss) for value in metrics]
    logits = loss in ("bce_with_logits", "binary_cross_entropy_with_logits") if isinstance(loss, str) else False
    if metrics == "accuracy" and logits:
        return keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)
    if isinstance(metrics, keras.metrics.Metric):
        return type(metrics).from_config(metrics.get_config())
    return _named(metrics, METRICS)

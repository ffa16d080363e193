"""Tasks of Keras members: how their models were compiled, as a value that can be compared."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import keras

from modelfleet.fingerprints import fingerprint
from modelfleet.frameworks.keras.optimizers import averages_weights
from modelfleet.frameworks.keras.structure import owned_by
from modelfleet.frameworks.keras.values import Owned, freeze, show
from modelfleet.frameworks.structure import Opaque

# Attributes that Keras keeps on every optimizer for itself. Variables without weight decay are compared by
# position.
_BOOKKEEPING = frozenset(
    {"_lock", "name", "built", "_variables", "_trainable_variables", "_tracker", "_trainable_variables_indices"}
    | {"_iterations", "_learning_rate", "_distribution_strategy", "_accumulated_gradients"}
    | {"_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern", "_exclude_from_weight_decay_cache"}
)
_STRING_LAYERS = (keras.layers.StringLookup, keras.layers.TextVectorization)
_STEPS = ("train_step", "test_step", "predict_step", "make_train_function", "make_test_function")

_tasks: WeakValueDictionary[Hashable, "Task"] = WeakValueDictionary()  # tasks that are still in use, by key


@dataclass(frozen=True, eq=False)
class Task:
    """Compile settings of models. Members that may be fused have the same task object."""

    summary: str
    key: Hashable = field(repr=False)
    plain: str | None = None
    """Reason why a member runs alone, by the functions of its own `fit`; None if its steps are pure functions."""
    optimizer_name: str = "no optimizer"
    """Name of the optimizer, for a plan."""
    forward: Hashable = None
    """Equal for tasks that differ in their optimizers only. None if the optimizer takes part in the loss."""
    optimizer: Hashable = None
    """Settings of the optimizer."""


def task_of(model: keras.Model) -> Task:
    """Return the task of all models that are compiled like this one, or its own task if it runs on its own."""
    plain = _plain_reason(model)
    if plain is not None:
        key = plain, Opaque(model), model.compiled and id(model._compile_config)
        return _cached(key, lambda: ", ".join([plain, *_loss_fingerprints(model)]), plain)
    if not model.compiled:
        return _cached(("predict",), lambda: "predict")
    config = dict(model._compile_config.config)
    owned = owned_by(model)
    parts = {key: freeze(config[key], owned) for key in ("loss", "loss_weights", "metrics", "weighted_metrics")}
    parts["optimizer"] = optimizer_key(model.optimizer, model.trainable_variables, owned)

    def summary() -> str:
        shown = [f"{key} {show(value)}" for key, value in parts.items() if value != freeze(None)]
        return ", ".join([*shown, *_loss_fingerprints(model)])

    others = tuple((key, value) for key, value in parts.items() if key != "optimizer")
    return _cached(
        tuple(parts.items()),
        summary,
        optimizer=model.optimizer,
        forward=None if _scales(model.optimizer) else others,
        settings=parts["optimizer"],
    )


def _scales(optimizer: keras.Optimizer | None) -> bool:
    """Return True if an optimizer scales the loss."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner is not optimizer or getattr(optimizer, "loss_scale_factor", None) is not None


def optimizer_key(
    optimizer: keras.Optimizer | None, trained: Sequence[keras.Variable], owned: Owned | None = None
) -> Hashable:
    """Return an optimizer's settings as a value, without a learning rate that is a plain number.

    The value is made of attributes, not of the config, which may be incomplete for a user's own class.
    """
    if optimizer is None:
        return freeze(None)
    inner: keras.Optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    variables = {id(variable) for variable in inner.variables}
    settings: dict[str, object] = {}
    for name, value in vars(inner).items():
        if name in _BOOKKEEPING or name.startswith("_self_"):
            continue
        is_state = isinstance(value, list) and all(id(item) in variables for item in value)
        if not is_state and id(value) not in variables:
            settings[name] = value
    if not isinstance(inner._learning_rate, keras.Variable):
        settings["learning_rate"] = inner._learning_rate
    excluded = getattr(inner, "_exclude_from_weight_decay", None) or set()
    positions = [index for index, v in enumerate(trained) if inner._var_key(v) in excluded]
    pattern = getattr(inner, "_exclude_from_weight_decay_pattern", None)
    settings["spared from weight decay"] = [positions, pattern and pattern.pattern]
    if inner is not optimizer:
        settings["growth steps of the loss scale"] = getattr(optimizer, "dynamic_growth_steps", None)
    return type(inner), freeze(settings, owned)


def _plain_reason(model: keras.Model) -> str | None:
    """Return why a model's steps are not pure functions of its variables, as far as is known before a batch."""
    for step in _STEPS:
        if getattr(type(model), step) is not getattr(keras.Model, step) or step in vars(model):
            return f"{type(model).__name__} overrides {step}"
    if model.compiled and model.run_eagerly:
        return "it was compiled with run_eagerly=True"
    strings = any(getattr(tensor, "dtype", None) == "string" for tensor in keras.tree.flatten(_inputs(model)))
    if strings or any(isinstance(layer, _STRING_LAYERS) for layer in model._flatten_layers()):
        return "its inputs are strings"
    if any(getattr(layer, "stateful", False) is True for layer in model._flatten_layers()):
        return "it has a stateful layer"
    optimizer = model.optimizer if model.compiled else None
    if averages_weights(optimizer):
        return "its optimizer has use_ema=True"
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "gradient_accumulation_steps", None) and keras.backend.backend() != "jax":
        return "its optimizer has gradient_accumulation_steps"
    return None


def _inputs(model: keras.Model) -> list[keras.KerasTensor]:
    """Return the inputs that a model declares. A user's own class may declare none."""
    try:
        return model.inputs or []
    except (AttributeError, ValueError):
        return []


def _cached(
    key: Hashable,
    summary: Callable[[], str],
    plain: str | None = None,
    optimizer: keras.Optimizer | None = None,
    forward: Hashable = None,
    settings: Hashable = None,
) -> Task:
    found = _tasks.get(key)
    if found is not None:
        return found
    name = "no optimizer" if optimizer is None else type(optimizer).__name__
    return _tasks.setdefault(key, Task(summary(), key, plain, name, forward, settings))


def _loss_fingerprints(model: keras.Model) -> list[str]:
    """Return fingerprints of the user's own losses, which change when their code is edited."""
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

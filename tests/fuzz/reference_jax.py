"""What the programs do to JAX models by Flax and Optax, untraced: a loop for each member."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hypothesis import strategies as st
from tests.fuzz.models_jax import Net, make, observe
from tests.fuzz.programs import Add, Compile, Edit, Evaluate, Fit, Freeze, Predict, Recipe, Train, turns
from tests.fuzz.reference import Knob, Reference, Totals, zipped

History = dict[str, dict[str, list[float]]]


def _call(model: Any, x: Any) -> Any:
    return model[1](model[0], x) if isinstance(model, tuple) else model(x)


def _params(model: Any) -> Any:
    return jax.tree.leaves(model[0] if isinstance(model, tuple) else nnx.state(model, nnx.Param))


NAMES: dict[str, Callable[[Any, Any], Any]] = {
    "mse": lambda o, y: optax.squared_error(o, y).mean(),
    "mae": lambda o, y: jnp.abs(o - y).mean(),
    "huber": lambda o, y: optax.huber_loss(o, y).mean(),
    "cross_entropy": lambda o, y: optax.softmax_cross_entropy_with_integer_labels(o, y).mean(),
}
OBJECTIVES = ("objective", "with metrics", "decay", "knob")
LOSSES = {
    "numbers": ("mse", "mae", "huber", "function", *OBJECTIVES),
    "classes": ("cross_entropy", "function", *OBJECTIVES),
}
METRICS = {"numbers": ("mse", "mae"), "classes": ("accuracy",)}
OPTIMIZERS: dict[str, Any] = {
    "sgd": optax.sgd,
    "adam": optax.adam,
    "adamw": optax.adamw,
    "rmsprop": optax.rmsprop,
    "adagrad": optax.adagrad,
    "nadam": optax.nadam,
    "adamax": optax.adamax,
}
EPSILON = {"adam", "adamw", "rmsprop", "adagrad", "nadam", "adamax"}


def loss_of(recipe: Recipe, task: str, knob: Knob) -> dict[str, Any]:
    """The keywords for `compile`: a loss, as a name or a function, or an objective."""
    base = NAMES["mse" if task == "numbers" else "cross_entropy"]

    def decay(model: Any, batch: Any) -> Any:
        squares = sum(jnp.sum(leaf**2) for leaf in _params(model))
        return base(_call(model, batch[0]), batch[1]) + 0.01 * squares

    def with_metrics(model: Any, batch: Any) -> Any:
        output = _call(model, batch[0])
        return base(output, batch[1]), {"largest": jnp.abs(output).max()}

    objectives: dict[str, Any] = {
        "objective": lambda model, batch: base(_call(model, batch[0]), batch[1]),
        "with metrics": with_metrics,
        "decay": decay,
        "knob": lambda model, batch: base(_call(model, batch[0]), batch[1]) * knob.value,
    }
    if recipe.loss in objectives:
        return {"objective": objectives[recipe.loss]}
    return {"loss": (lambda o, y: 2 * base(o, y)) if recipe.loss == "function" else recipe.loss}


class JaxReference(Reference):
    """Members, each with its model, its optimizer and its loss."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.models: dict[str, Any] = {}
        self.nets: dict[str, Net] = {}
        self.recipes: dict[str, tuple[Recipe, dict[str, Any], dict[str, Any]]] = {}
        self.slots: dict[str, Any] = {}

    def enlist(self, name: str, net: Net) -> None:
        self.nets[name] = net
        self.models[name] = make(net, self.program.dtype)

    def observe(self, name: str) -> dict[str, Any]:
        return observe(self.models[name])

    def forget(self, name: str) -> None:
        for kept in (self.models, self.nets, self.recipes, self.slots):
            kept.pop(name, None)

    def clone(self, name: str, new: str) -> None:
        model = self.models[name]
        self.models[new] = model if isinstance(model, tuple) else nnx.clone(model)
        self.nets[new], self.recipes[new] = self.nets[name], self.recipes[name]
        if name in self.slots:
            self.slots[new] = jax.tree.map(lambda leaf: leaf, self.slots[name])

    def reload(self) -> None:
        for name, old in self.models.items():
            if not isinstance(old, tuple):  # what is kept of a module are its variables, not its attributes
                self.models[name] = make(self.nets[name], self.program.dtype)
                nnx.update(self.models[name], nnx.state(old))
        self.recipes.clear()
        self.slots.clear()

    def freeze(self, verb: Freeze, name: str) -> None: ...

    def edit(self, verb: Edit, name: str, other: str) -> None:
        edit(self.models[name], self.models[other], verb)

    def train(self, verb: Train, name: str, batches: Any) -> None:
        train(self.models[name], batches, self.program.task)

    # --- training ----------------------------------------------------------------------------------------------

    def compile(self, verb: Compile | Add, names: list[str]) -> None:
        for number, name in enumerate(names):
            own = {key: turns(value, number) for key, value in verb.recipe.hyper}
            own["clip"] = turns(verb.recipe.clip, number)
            self.recipes[name] = (verb.recipe, own, loss_of(verb.recipe, self.program.task, self.knob))
            self.slots.pop(name, None)

    def _update(self, name: str) -> Any:
        recipe, own, _ = self.recipes[name]
        options = {"learning_rate" if key == "lr" else key: value for key, value in own.items() if key != "clip"}
        made = OPTIMIZERS[recipe.optimizer](**options)
        return made if own["clip"] is None else optax.chain(optax.clip_by_global_norm(own["clip"]), made)

    def _loss(self, name: str) -> Callable[[Any, Any], Any]:
        _, _, given = self.recipes[name]

        def run(model: Any, batch: Any) -> Any:
            if "objective" in given:
                result = given["objective"](model, batch)
                return result if isinstance(result, tuple) else (result, {})
            output = _call(model, batch[0])
            loss = given["loss"]
            return (NAMES[loss] if isinstance(loss, str) else loss)(output, batch[1]), {"": output}

        return run

    def _step(self, name: str, batch: Any) -> Any:
        update, loss, model = self._update(name), self._loss(name), self.models[name]
        if isinstance(model, tuple):
            params, apply = model
            of = jax.value_and_grad(lambda params: loss((params, apply), batch), has_aux=True)
            result, gradients = of(params)
            slots = self.slots.get(name) or update.init(params)
            changes, self.slots[name] = update.update(gradients, slots, params)
            self.models[name] = (optax.apply_updates(params, changes), apply)
            return result
        result, gradients = nnx.value_and_grad(loss, has_aux=True)(model, batch)
        params = nnx.state(model, nnx.Param)
        slots = self.slots.get(name) or update.init(params)
        changes, self.slots[name] = update.update(gradients, slots, params)
        nnx.update(model, optax.apply_updates(params, changes))
        return result

    def fit(self, verb: Fit, callback: Any) -> History:
        names = list(self.names)
        epochs = {name: turns(verb.epochs, number) for number, name in enumerate(names)}
        history: History = {name: {} for name in names}
        stopped: set[str] = set()
        sources = self.sources(verb.data, verb.batch, names, verb.limit)
        for epoch in range(max(epochs.values())):
            active = [name for name in names if epoch < epochs[name] and name not in stopped]
            totals: dict[str, Totals] = {name: Totals() for name in active}
            for name in active:
                _mode(self.models[name], train=True)
            for batches in zipped(sources, active):
                for name, batch in batches.items():
                    placed = tuple(map(jnp.asarray, batch))
                    totals[name].add(self._step(name, placed), batch, self.recipes[name][0])
            for name in active:
                totals[name].note(history[name], "")
                if verb.validation is not None:
                    values = self._evaluated(name, self.batches(verb.validation, verb.validation_batch, name))
                    values.note(history[name], "val_")
            if not active:
                break
            stopped |= callback(epoch + 1)
        callback(0)
        return history

    def _evaluated(self, name: str, batches: Any) -> Totals:
        totals, model = Totals(), self.models[name]
        _mode(model, train=False)
        for batch in batches:
            result = self._loss(name)(model, tuple(map(jnp.asarray, batch)))
            totals.add(result, batch, self.recipes[name][0])
        _mode(model, train=True)
        return totals

    def evaluate(self, verb: Evaluate) -> dict[str, dict[str, float]]:
        return {
            name: self._evaluated(name, self.batches(verb.data, verb.batch, name)).values() for name in self.names
        }

    def predict(self, verb: Predict) -> dict[str, Any]:
        found = {}
        for name in self.names:
            model = self.models[name]
            batches = self.batches(verb.data, verb.batch, name)
            _mode(model, train=False)
            found[name] = np.concatenate([np.asarray(_call(model, jnp.asarray(x))) for x, _ in batches])
            _mode(model, train=True)
        return found


def _mode(model: Any, *, train: bool) -> None:
    if not isinstance(model, tuple):
        model.train() if train else model.eval()


def edit(model: Any, other: Any, verb: Edit) -> None:
    if isinstance(model, tuple) or isinstance(other, tuple):
        return
    if verb.how == "attribute":
        for part in model.parts:
            if isinstance(getattr(part, "scale", None), float):
                part.scale = 1.5
    elif verb.how == "copy":
        model.head.kernel[...] = other.head.kernel[...] + 0
    else:
        model.head.kernel[...] = 1.5 * model.head.kernel[...]


def train(model: Any, batches: Any, task: str) -> None:
    """A loop of a user's own: one epoch of SGD."""
    if isinstance(model, tuple):
        return
    loss = NAMES["mse" if task == "numbers" else "cross_entropy"]
    model.train()
    optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)
    for x, y in batches:
        x, y = jnp.asarray(x), jnp.asarray(y)
        gradients = nnx.grad(lambda model, x=x, y=y: loss(model(x), y))(model)
        optimizer.update(model, gradients)


@st.composite
def recipes(draw: Callable[..., Any], task: str, dtype: str) -> Recipe:
    """Any recipe for a task."""
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    hyper: list[tuple[str, Any]] = [("lr", draw(st.sampled_from([0.02, 0.05, (0.01, 0.05)])))]
    if optimizer in EPSILON:
        hyper.append(("eps", 1e-3))  # else rounding decides where a gradient is all but 0
    if optimizer == "sgd":
        hyper += draw(st.sampled_from([[], [("momentum", 0.9)], [("momentum", (0.5, 0.9))]]))
    if optimizer == "adamw":
        hyper += draw(st.sampled_from([[], [("weight_decay", (0.0, 0.1))]]))
    loss = draw(st.sampled_from(LOSSES[task]))
    metrics = METRICS[task] if loss not in OBJECTIVES and draw(st.booleans()) else ()
    clip = draw(st.sampled_from([None, None, 0.3, (0.1, 1.0)]))
    form = draw(st.sampled_from(["name", "name", "class"]))
    return Recipe(optimizer, tuple(hyper), loss, metrics, clip, None, "float32", form)

"""What the programs do to Keras models by Keras: `compile`, `fit`, `evaluate` and `predict` of each model."""

import copy
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from hypothesis import strategies as st
from tests.fuzz.models_keras import Net, make, observe
from tests.fuzz.programs import Add, Compile, Data, Edit, Evaluate, Fit, Freeze, Predict, Recipe, Train, turns
from tests.fuzz.reference import Reference

LOSSES = {"numbers": ("mse", "mae", "function"), "classes": ("classes", "function")}
METRICS = {"numbers": ("mae",), "classes": ("accuracy",)}
OPTIMIZERS: dict[str, Any] = {
    "sgd": keras.optimizers.SGD,
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "rmsprop": keras.optimizers.RMSprop,
    "nadam": keras.optimizers.Nadam,
    "adagrad": keras.optimizers.Adagrad,
}


def compile_one(model: Any, recipe: Recipe, number: int, task: str) -> None:
    """As a user compiles one Keras model."""
    options = {
        {"lr": "learning_rate", "eps": "epsilon"}.get(key, key): turns(value, number)
        for key, value in recipe.hyper
    }
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def function(y: Any, output: Any) -> Any:
        return 2 * (keras.losses.mean_squared_error(y, output) if task == "numbers" else classes(y, output))

    loss: Any = {"function": function, "classes": classes}.get(recipe.loss, recipe.loss)
    clip = turns(recipe.clip, number)
    made = OPTIMIZERS[recipe.optimizer](**options, **({} if clip is None else {"global_clipnorm": clip}))
    model.compile(made, loss, metrics=list(recipe.metrics))


class KerasReference(Reference):
    """Members, each a compiled Keras model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.models: dict[str, Any] = {}
        self.compiled: dict[str, tuple[Recipe, int]] = {}
        self.nets: dict[str, Net] = {}

    def enlist(self, name: str, net: Net) -> None:
        self.nets[name] = net
        self.models[name] = make(net, self.program.dtype)

    def observe(self, name: str) -> dict[str, Any]:
        return observe(self.models[name])

    def forget(self, name: str) -> None:
        del self.models[name]

    def clone(self, name: str, new: str) -> None:
        old = self.models[name]
        self.enlist(new, self.nets[name])
        for own, variable in zip(self.models[new].variables, old.variables, strict=False):
            own.assign(np.array(keras.ops.convert_to_numpy(variable)))  # JAX would share the array
        for own, layer in zip(self.models[new].layers, old.layers, strict=True):
            own.trainable = layer.trainable
        self._compile(new, *self.compiled[name])
        if old.optimizer.built:
            self.models[new].optimizer.build(self.models[new].trainable_variables)
            for own, variable in zip(self.models[new].optimizer.variables, old.optimizer.variables, strict=True):
                own.assign(np.array(keras.ops.convert_to_numpy(variable)))

    def reload(self) -> None: ...

    def freeze(self, verb: Freeze, name: str) -> None:
        freeze(self.models[name], verb)
        self._compile(name, *self.compiled[name])

    def edit(self, verb: Edit, name: str, other: str) -> None:
        edit(self.models[name], self.models[other], verb)

    def train(self, verb: Train, name: str, batches: Any) -> None:
        train(self.models[name], batches, self.program.task)

    def compile(self, verb: Compile | Add, names: list[str]) -> None:
        for number, name in enumerate(names):
            self._compile(name, verb.recipe, number)

    def _compile(self, name: str, recipe: Recipe, number: int) -> None:
        self.compiled[name] = (recipe, number)
        compile_one(self.models[name], recipe, number, self.program.task)
        if keras.backend.backend() == "tensorflow":
            self.models[name].run_eagerly = True  # the same numbers, without a minute of tracing

    def _batches(self, data: Data, batch: int, name: str) -> Any:
        """What Keras is given: arrays, or batches that can be read again."""
        member = None if data.own is None else self.numbers[name]
        if data.form == "arrays":
            return self.arrays(data, member)
        return self.loader(data, batch, member)

    def fit(self, verb: Fit, callback: Any) -> Any:
        names = list(self.names)
        epochs = {name: turns(verb.epochs, number) for number, name in enumerate(names)}
        history: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        stopped: set[str] = set()
        sources = self.sources(verb.data, verb.batch, names, verb.limit)
        for epoch in range(max(epochs.values())):
            active = [name for name in names if epoch < epochs[name] and name not in stopped]
            for name in active:
                options: dict[str, Any] = self._given(verb.data, verb.batch, name)
                if verb.limit is not None:
                    stretched = sources.get(name) or sources.setdefault(name, copy.copy(sources[""]))
                    options = {"x": (batch for batch in stretched), "steps_per_epoch": verb.limit}
                if verb.validation is not None:
                    held = self._given(verb.validation, verb.validation_batch, name)
                    options["validation_data"] = held["x"] if "y" not in held else (held["x"], held["y"])
                    if "batch_size" in held:
                        options["validation_batch_size"] = held["batch_size"]
                found = self.models[name].fit(
                    **options, initial_epoch=epoch, epochs=epoch + 1, shuffle=False, verbose=0
                )
                for key, values in found.history.items():
                    history[name].setdefault(key, []).extend(map(float, values))
            if not active:
                break
            stopped |= callback(epoch + 1)
        callback(0)
        return history

    def _given(self, data: Data, batch: Any, name: str) -> dict[str, Any]:
        size = self.size(data, batch, name)
        found = self._batches(data, size, name)
        if isinstance(found, tuple):
            return {"x": found[0], "y": found[1], "batch_size": size}
        return {"x": (batch for batch in found)}  # Keras takes generators, not iterators

    def evaluate(self, verb: Evaluate) -> dict[str, dict[str, float]]:
        found = {}
        for name in self.names:
            given = self._given(verb.data, verb.batch, name)
            values = self.models[name].evaluate(**given, return_dict=True, verbose=0)
            found[name] = {key: float(value) for key, value in values.items()}
        return found

    def predict(self, verb: Predict) -> dict[str, Any]:
        found = {}
        for name in self.names:
            model = self.models[name]
            if keras.backend.backend() == "tensorflow":
                model.run_eagerly = True
            x = self._given(verb.data, verb.batch, name)
            x.pop("y", None)
            found[name] = model.predict(**x, verbose=0)
        return found


def freeze(model: Any, verb: Freeze) -> None:
    layers = [layer for layer in model.layers if layer.variables]
    layers[verb.part % len(layers)].trainable = not verb.on


def edit(model: Any, other: Any, verb: Edit) -> None:
    head = model.get_layer("head")
    if verb.how == "attribute":
        model.optimizer.learning_rate = 0.03
    elif verb.how == "copy":
        head.set_weights(other.get_layer("head").get_weights())
    else:
        head.kernel.assign(1.5 * head.kernel.value)


def train(model: Any, batches: Any, task: str) -> None:
    """A user's own training: with the model's own optimizer, batch by batch."""
    for x, y in batches:
        model.train_on_batch(np.asarray(x), np.asarray(y))


@st.composite
def recipes(draw: Callable[..., Any], task: str, dtype: str) -> Recipe:
    """Any recipe for a task."""
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    hyper: list[tuple[str, Any]] = [("lr", draw(st.sampled_from([0.02, 0.05, (0.01, 0.05)])))]
    if optimizer != "sgd":
        hyper.append(("eps", 1e-3))  # else rounding decides where a gradient is all but 0
    elif draw(st.booleans()):
        hyper.append(("momentum", 0.9))
    if optimizer in ("adam", "sgd") and draw(st.booleans()):
        hyper.append(("weight_decay", 0.01))
    loss = draw(st.sampled_from(LOSSES[task]))
    metrics = METRICS[task] if draw(st.booleans()) else ()
    clip = draw(st.sampled_from([None, None, 0.3]))
    return Recipe(optimizer, tuple(hyper), loss, metrics, clip, None, "float32", "class")

"""Random Keras models of parts that keep four features, for any backend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from hypothesis import strategies as st
from keras import layers, ops
from tests.fuzz.data import CLASSES, FEATURES, LENGTH, WORDS

KINDS = ("vector", "sequence", "tokens")
WIDTH = FEATURES


@dataclass(frozen=True)
class Net:
    """A model: the names of its parts, and the seed of its weights. `frozen`: parts that are not trained."""

    kind: str = "vector"
    parts: tuple[str, ...] = ("dense", "tanh")
    seed: int = 0
    frozen: tuple[int, ...] = ()


@keras.saving.register_keras_serializable("fuzz")
class Counting(layers.Layer):
    """Counts its calls in a variable."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any) -> Any:
        self.calls.assign(self.calls + 1)
        return x * (1 + 0.1 * ops.convert_to_tensor(self.calls))


@keras.saving.register_keras_serializable("fuzz")
class Sampling(layers.Layer):
    """Adds noise, also outside of training, as a VAE does."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self.generator = keras.random.SeedGenerator(seed)

    def call(self, x: Any) -> Any:
        return x + 0.1 * keras.random.normal(ops.shape(x), dtype=x.dtype, seed=self.generator)


@keras.saving.register_keras_serializable("fuzz")
class Scaled(layers.Layer):
    """Has a plain attribute that decides what it computes."""

    def __init__(self, gain: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.gain = gain

    def call(self, x: Any) -> Any:
        return x * self.gain


@keras.saving.register_keras_serializable("fuzz")
class Penalized(layers.Layer):
    """Adds to the loss."""

    def __init__(self, rate: float, **options: Any) -> None:
        super().__init__(**options)
        self.rate = rate

    def call(self, x: Any) -> Any:
        self.add_loss(self.rate * ops.mean(ops.square(x)))
        return x


@keras.saving.register_keras_serializable("fuzz")
class Mixing(layers.Layer):
    """Rows feel each other."""

    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0)


def _dense(seed: int, **options: Any) -> Any:
    return layers.Dense(WIDTH, kernel_initializer=keras.initializers.GlorotUniform(seed=seed + 1), **options)


def _start(seed: int) -> dict[str, Any]:
    return {
        "kernel_initializer": keras.initializers.GlorotUniform(seed=seed + 1),
        "recurrent_initializer": keras.initializers.GlorotUniform(seed=seed + 2),
        "seed": seed + 3,  # else it is drawn, and kept in a variable
    }


PARTS: dict[str, Callable[[int], Any]] = {
    "dense": _dense,
    "tanh": lambda seed: layers.Activation("tanh"),
    "layernorm": lambda seed: layers.LayerNormalization(),
    "norm": lambda seed: layers.BatchNormalization(momentum=0.8),
    "unit norm": lambda seed: layers.UnitNormalization(),
    "dropout": lambda seed: layers.Dropout(0.3, seed=seed + 1),
    "noise": lambda seed: layers.GaussianNoise(0.2, seed=seed + 1),
    "sampling": Sampling,
    "counting": lambda seed: Counting(),
    "scaled": lambda seed: Scaled(1.0 + 0.5 * (seed % 2)),
    "penalized": lambda seed: Penalized(0.01 * (1 + seed % 2)),
    "mixing": lambda seed: Mixing(),
    "activity": lambda seed: _dense(seed, activity_regularizer=keras.regularizers.L2(0.01 * (1 + seed % 2))),
    "regularized": lambda seed: _dense(seed, kernel_regularizer=keras.regularizers.L2(0.01 * (1 + seed % 2))),
    "constrained": lambda seed: _dense(seed, kernel_constraint=keras.constraints.MaxNorm(0.5 + seed % 2)),
    "spectral": lambda seed: layers.SpectralNormalization(_dense(seed)),
    "residual": lambda seed: "residual",
}
SEQUENCE: dict[str, Callable[[int], Any]] = {
    "lstm": lambda seed: layers.LSTM(WIDTH, return_sequences=True, **_start(seed)),
    "gru": lambda seed: layers.GRU(WIDTH, return_sequences=True, **_start(seed)),
    "convolution": lambda seed: layers.Conv1D(
        WIDTH, 3, padding="same", kernel_initializer=keras.initializers.GlorotUniform(seed=seed + 1)
    ),
    "attention": lambda seed: "attention",
}


def table(kind: str) -> dict[str, Callable[[int], Any]]:
    """The parts that models of this kind can have."""
    return PARTS if kind == "vector" else PARTS | SEQUENCE


def make(net: Net, dtype: str, trunk: Any = None) -> Any:
    """A new model, built."""
    shape = {"vector": (WIDTH,), "sequence": (LENGTH, WIDTH), "tokens": (LENGTH,)}[net.kind]
    start = keras.initializers.RandomNormal(seed=net.seed + 7)
    x = given = keras.Input(shape, dtype="int32" if net.kind == "tokens" else dtype)
    if net.kind == "tokens":
        x = layers.Embedding(WORDS, WIDTH, embeddings_initializer=start)(x)
    for number, name in enumerate(net.parts):
        part = table(net.kind)[name](10 * net.seed + number)
        if part == "residual":
            x = layers.Add()([x, _dense(net.seed + number)(x)])
        elif part == "attention":
            attention = layers.MultiHeadAttention(
                2, 2, kernel_initializer=keras.initializers.GlorotUniform(seed=net.seed + 3), seed=net.seed + 4
            )
            x = layers.Add()([x, attention(x, x)])
        else:
            part.trainable = number not in net.frozen
            x = part(x)
    if net.kind != "vector":
        x = layers.GlobalAveragePooling1D()(x)
    head = layers.Dense(CLASSES, kernel_initializer=keras.initializers.GlorotUniform(seed=net.seed), name="head")
    model = keras.Model(given, head(x))
    for number, layer in enumerate(model.layers):
        if isinstance(layer, layers.SpectralNormalization):  # which draws its vector without a seed
            drawn = np.random.default_rng([net.seed, number]).normal(0.0, 0.02, layer.vector_u.shape)
            layer.vector_u.assign(drawn.astype(dtype))
    return model


def observe(model: Any) -> dict[str, Any]:
    """All that a model holds, its optimizer's variables too."""
    found = {
        f"{number} {variable.path.rpartition('/')[2]}": _numbers(variable)
        for number, variable in enumerate(model.variables)
        if id(variable) not in {id(own) for own in model.metrics_variables}
    }
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        found |= {f"optimizer {number}": _numbers(variable) for number, variable in enumerate(optimizer.variables)}
    return found


def _numbers(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable.value))


@st.composite
def nets(draw: Callable[..., Any], kind: str, count: int, dtype: str) -> tuple[Net, ...]:
    """Nets for as many members: most of one structure."""
    names = sorted(table(kind))
    parts = tuple(draw(st.lists(st.sampled_from(names), min_size=0, max_size=2)))
    frozen = tuple(draw(st.lists(st.integers(0, 1), max_size=1)))
    found = [Net(kind, parts, 0, frozen)]
    for number in range(1, count):
        if draw(st.integers(0, 3)):
            found.append(Net(kind, parts, number, frozen))
        else:
            found.append(Net(kind, tuple(draw(st.lists(st.sampled_from(names), min_size=0, max_size=1))), number))
    return tuple(found)


def stateful(net: Net) -> bool:
    """Whether a model keeps something in Python."""
    return False

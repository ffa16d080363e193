"""Random JAX models: Flax NNX modules of parts that keep four features, and pairs of params and a function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import strategies as st
from tests.fuzz.data import CLASSES, FEATURES, WORDS

KINDS = ("vector", "sequence", "tokens")
WIDTH = FEATURES


@dataclass(frozen=True)
class Net:
    """A model: the names of its parts, and the seed of its weights. `pair`: params and a function."""

    kind: str = "vector"
    parts: tuple[str, ...] = ("linear", "tanh")
    seed: int = 0
    pair: bool = False


class Part(nnx.Module):
    """A part with a layer of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)


class Plain(nnx.Module):
    """A function as a part."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, x: Any) -> Any:
        return self.function(x)


class Residual(Part):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.gate = nnx.Param(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        return x + self.gate[...] * self.layer(x)


class Count(nnx.Variable):
    """A number that is not trained."""


class Counting(Part):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.calls = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.calls[...] = self.calls[...] + 1
        return self.layer(x) * (1 + 0.1 * self.calls[...])


class Averaging(Part):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.average = nnx.BatchStat(jnp.zeros(WIDTH))

    def __call__(self, x: Any) -> Any:
        mean = jax.lax.stop_gradient(x.reshape(-1, WIDTH).mean(0))
        self.average[...] = 0.9 * self.average[...] + 0.1 * mean
        return self.layer(x - self.average[...])


class Frozen(nnx.Module):
    """Its weights are no params."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = Count(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 2)

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel[...]


class Scaled(Part):
    """Has a plain attribute that its owner may change."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.scale = 1.0

    def __call__(self, x: Any) -> Any:
        return self.scale * self.layer(x)


class Branching(Part):
    def __call__(self, x: Any) -> Any:
        return self.layer(x) if x.sum() > 0 else -x


class Mixing(Part):
    def __call__(self, x: Any) -> Any:
        return self.layer(x) - x.mean(0)


class HiddenNorm(Part):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, scale_init=nnx.initializers.zeros)

    def __call__(self, x: Any) -> Any:
        return x + self.norm(self.layer(x))


class Spectral(Part):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.norm = nnx.SpectralNorm(self.layer, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(x, update_stats=True)


class Remat(Part):
    def __call__(self, x: Any) -> Any:
        return nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(self.layer, x)


PARTS: dict[str, Callable[[nnx.Rngs], Any]] = {
    "linear": lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
    "tanh": lambda rngs: Plain(jnp.tanh),
    "gelu": lambda rngs: Plain(nnx.gelu),
    "layernorm": lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs),
    "norm": lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs),
    "groupnorm": lambda rngs: nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs),
    "dropout": lambda rngs: nnx.Dropout(0.3, rngs=rngs),
    "residual": Residual,
    "counting": Counting,
    "averaging": Averaging,
    "frozen": Frozen,
    "scaled": Scaled,
    "branching": Branching,
    "mixing": Mixing,
    "hidden norm": HiddenNorm,
    "spectral": Spectral,
    "remat": Remat,
}
SEQUENCE: dict[str, Callable[[nnx.Rngs], Any]] = {
    "lstm": lambda rngs: nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs)),
    "gru": lambda rngs: nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)),
    "attention": lambda rngs: nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs),
    "convolution": lambda rngs: nnx.Conv(WIDTH, WIDTH, (3,), rngs=rngs),
}


class Model(nnx.Module):
    """An entry, parts, and a head."""

    def __init__(self, net: Net) -> None:
        rngs = nnx.Rngs(net.seed)
        self.kind = net.kind
        self.entry = nnx.Embed(WORDS, WIDTH, rngs=rngs) if net.kind == "tokens" else None
        self.parts = nnx.List([table(net.kind)[name](rngs) for name in net.parts])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        if self.entry is not None:
            x = self.entry(x)
        for part in self.parts:
            x = part(x)
        return self.head(x if self.kind == "vector" else x.mean(1))


def _apply(params: Any, x: Any) -> Any:
    if "words" in params:
        x = params["words"][x]
    x = jnp.tanh(x @ params["first"])
    return (x if x.ndim == 2 else x.mean(1)) @ params["second"] + params["bias"]


def _pair(net: Net) -> tuple[Any, Any]:
    generator = np.random.default_rng(net.seed)

    def weights(*shape: int) -> Any:
        return jnp.asarray(generator.normal(size=shape) / 2, jnp.float32)

    params = {"first": weights(WIDTH, WIDTH), "second": weights(WIDTH, CLASSES), "bias": weights(CLASSES)}
    return (params | {"words": weights(WORDS, WIDTH)} if net.kind == "tokens" else params), _apply


def table(kind: str) -> dict[str, Callable[[nnx.Rngs], Any]]:
    """The parts that models of this kind can have."""
    return PARTS if kind == "vector" else PARTS | SEQUENCE


def make(net: Net, dtype: str, trunk: Any = None) -> Any:
    """A new model."""
    return _pair(net) if net.pair else Model(net)


def observe(model: Any) -> dict[str, Any]:
    """All that a model holds."""
    if isinstance(model, tuple):
        return {name: np.asarray(leaf) for name, leaf in model[0].items()}
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(model))[0]:
        key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found[jax.tree_util.keystr(path)] = np.asarray(jax.random.key_data(leaf) if key else leaf)
    for number, part in enumerate(model.parts):
        if hasattr(part, "scale") and isinstance(part.scale, float):
            found[f"scale of {number}"] = part.scale
    return found


@st.composite
def nets(draw: Callable[..., Any], kind: str, count: int, dtype: str) -> tuple[Net, ...]:
    """Nets for as many members: most of one structure."""
    names = sorted(table(kind))
    parts = tuple(draw(st.lists(st.sampled_from(names), min_size=0, max_size=3)))
    pair = draw(st.integers(0, 4)) == 0
    found = [Net(kind, () if pair else parts, 0, pair)]
    for number in range(1, count):
        if draw(st.integers(0, 3)):
            found.append(Net(kind, () if pair else parts, number, pair))
        else:
            found.append(Net(kind, tuple(draw(st.lists(st.sampled_from(names), min_size=0, max_size=2))), number))
    return tuple(found)


def stateful(net: Net) -> bool:
    """Whether a model keeps something in Python."""
    return False

"""Programs of a Keras node on JAX: its forward and backward pass, its loss and its update, each compiled once.

They are kept as long as the model lives, so that a second fit compiles nothing.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr

from modelfleet.errors import InputError
from modelfleet.frameworks.jax.backend import JaxBackend
from modelfleet.frameworks.keras.nodes.jax.draws import evaluate, find_draws
from modelfleet.frameworks.keras.nodes.losses import NodeLoss
from modelfleet.frameworks.keras.optimizers import Update
from modelfleet.frameworks.keras.structure import signature
from modelfleet.frameworks.keras.task import optimizer_key
from modelfleet.frameworks.keras.values import freeze
from modelfleet.frameworks.predicting_node import padded_call
from modelfleet.trees import leaves, map_tree, rebuild
from modelfleet.types import Tree

Values = list[jax.Array]
Result = tuple[Tree, Values, Any]
"""Outputs, the kept variables after them, and what the backward pass needs."""

_programs: WeakKeyDictionary[keras.Model, "NodePrograms"] = WeakKeyDictionary()


class NodePrograms:
    """Programs of one model. It only knows the model weakly, and so does not keep it alive."""

    def __init__(self, model: keras.Model, name: str, device: jax.Device) -> None:
        self.signature = signature(model)
        self.platform = device.platform
        self.trained: list[keras.Variable] = list(model.trainable_variables)
        self.kept: list[keras.Variable] = list(model.non_trainable_variables)
        self.name = name
        self._model = ref(model)
        self._backend = JaxBackend(device)
        self._known: dict[Hashable, Callable[..., Any]] = {}
        self._sizes: set[int] = set()  # numbers of rows that `predict` was called with

    # --- forward and backward ------------------------------------------------------------------------------------

    def predict(self, params: Values, kept: Values, x: Tree) -> Tree:
        """Return the outputs in inference mode."""
        program = self._program("predict", lambda: lambda *args: self._call(*args, training=False)[0])
        return padded_call(
            lambda x: program(params, kept, x),
            x,
            self._sizes,
            lambda tree: map_tree(np.asarray, tree),
            lambda tree: tree,
        )

    def train(
        self, params: Values, kept: Values, x: Tree, wanted: Sequence[int], start: int, rows_of_whole: int
    ) -> Result:
        """Return the outputs in training mode for the rows from `start` on, and what the backward pass needs.

        Args:
            params: The trained variables.
            kept: The others.
            x: The inputs.
            wanted: Numbers of the leaves of x that take a gradient.
            start: The first row.
            rows_of_whole: The number of rows of the whole batch.
        """
        places = tuple(wanted)

        def make() -> Callable[..., Result]:
            def run(params: Values, kept: Values, x: Tree, start: jax.Array) -> Result:
                return self._differentiated(params, kept, x, start, places, rows_of_whole)

            return run

        return self._program(("train", places, rows_of_whole), make)(params, kept, x, start)

    def backward(self, vjp: Any, gradients: Values) -> tuple[Values, Values]:
        """Return the gradients of the trained variables, and those of the wanted inputs."""
        return self._program("backward", lambda: lambda vjp, given: vjp(given))(vjp, gradients)

    def backward_inputs(self, vjp: Any, gradients: Values) -> Values:
        """Return only the gradients of the wanted inputs."""
        return self._program("inputs", lambda: lambda vjp, given: vjp(given)[1])(vjp, gradients)

    def backward_params(self, vjp: Any, gradients: Values) -> Values:
        """Return only the gradients of the trained variables."""
        return self._program("params", lambda: lambda vjp, given: vjp(given)[0])(vjp, gradients)

    def _differentiated(
        self, params: Values, kept: Values, x: Tree, start: jax.Array, wanted: tuple[int, ...], rows_of_whole: int
    ) -> Result:
        flat = leaves(x)

        def run(params: Values, chosen: Values) -> tuple[Values, tuple[Tree, Values]]:
            own = dict(zip(wanted, chosen, strict=True))
            given = rebuild(x, [own.get(place, leaf) for place, leaf in enumerate(flat)])
            outputs, after = self._sliced(params, kept, given, start, rows_of_whole)
            return [leaf for leaf in leaves(outputs) if is_float(leaf)], (outputs, after)

        _, vjp, (outputs, after) = jax.vjp(run, params, [flat[place] for place in wanted], has_aux=True)
        return outputs, after, vjp

    def _sliced(
        self, params: Values, kept: Values, x: Tree, start: jax.Array, rows_of_whole: int
    ) -> tuple[Tree, Values]:
        """Call the model in training mode, with its rows' part of all draws."""
        rows = len(leaves(x)[0])
        if rows == rows_of_whole:
            return self._call(params, kept, x, training=True)
        traced, structure = self._traced(params, kept, x, rows)
        draws = find_draws(traced, rows, self._traced(params, kept, x, rows_of_whole)[0], rows_of_whole)
        if not draws:
            return self._call(params, kept, x, training=True)
        return jax.tree.unflatten(structure, evaluate(traced, jax.tree.leaves((params, kept, x)), draws, start))

    def check_draws(self, params: Values, kept: Values, x: Tree) -> None:
        """Raise DrawsError if it can't be told which rows the draws of a micro-batch belong to."""
        rows = len(leaves(x)[0])
        find_draws(
            self._traced(params, kept, x, rows)[0], rows, self._traced(params, kept, x, 2 * rows)[0], 2 * rows
        )

    def _traced(self, params: Values, kept: Values, x: Tree, count: int) -> tuple[ClosedJaxpr, Any]:
        """Return the model in training mode, traced for a number of rows, and the structure of what it returns."""
        rows = len(leaves(x)[0])

        def call(params: Values, kept: Values, x: Tree) -> tuple[Tree, Values]:
            return self._call(params, kept, x, training=True)

        def shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((leaf.shape[0] * count // rows, *leaf.shape[1:]), leaf.dtype)

        inputs = rebuild(x, [shape(leaf) for leaf in leaves(x)])
        traced, found = jax.make_jaxpr(call, return_shape=True)(params, kept, inputs)
        return traced, jax.tree.structure(found)

    def _call(self, params: Values, kept: Values, x: Tree, *, training: bool) -> tuple[Tree, Values]:
        """Call the model with values for its variables. Return its outputs, and the kept variables after it."""
        model = self._model()
        assert model is not None
        mapping = [*zip(self.trained, params, strict=True), *zip(self.kept, kept, strict=True)]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            outputs = model(x, training=training) if model._call_has_training_arg else model(x)
        if training:
            self._refuse_effects(scope)
        after: list[Any] = [scope.get_current_value(variable) for variable in self.kept]
        return outputs, after

    def _refuse_effects(self, scope: keras.StatelessScope) -> None:
        """Raise InputError for what a model does beside its outputs, which a graph would lose."""
        own = {id(variable) for variable in (*self.trained, *self.kept)}
        if not set(scope.state_mapping) <= own:
            raise InputError(
                f"node {self.name!r} changes a variable that is not one of its own, as a draw without a seed of "
                f"its own does. Give the layer a keras.random.SeedGenerator, or make the variable one of "
                f"the model's."
            )
        if scope.losses or any(getattr(variable, "regularizer", None) for variable in self.trained):
            raise InputError(
                f"node {self.name!r} adds to the loss (a regularizer, or add_loss), which graphs do not add up "
                f"yet. Use weight_decay of the optimizer, or train the undivided model in a Fleet."
            )

    # --- loss and update -----------------------------------------------------------------------------------------

    def loss(self, loss: NodeLoss) -> Callable[..., Any]:
        """Return the program of a loss: (total, count, sums, gradient) of outputs, targets and so on."""

        def make() -> Callable[..., Any]:
            def run(
                output: jax.Array, y: Tree, weights: jax.Array | None, fraction: float, divisor: float
            ) -> tuple[jax.Array, Any]:
                def divided(output: jax.Array) -> tuple[jax.Array, Any]:
                    total, count, sums = loss.parts(output, y, weights, fraction)
                    return total / divisor, (total, count, sums)

                return jax.grad(divided, has_aux=True)(output)

            return run

        return self._program(("loss", freeze(loss.given)), make)

    def evaluation(self, loss: NodeLoss) -> Callable[..., Any]:
        """Return the program of a loss without its gradient."""
        return self._program(("evaluation", freeze(loss.given)), lambda: loss.parts)

    def update(self, optimizer: keras.Optimizer) -> Callable[..., tuple[Values, Values]]:
        """Return the program of an optimizer's step: of params, its own variables, gradients, and their scale."""

        def make() -> Callable[..., tuple[Values, Values]]:
            update = Update(optimizer)

            def run(params: Values, own: Values, gradients: Values, scale: float) -> tuple[Values, Values]:
                scaled = [gradient * jnp.asarray(scale, gradient.dtype) for gradient in gradients]
                return update(own, scaled, self.trained, params)

            return run

        return self._program(("update", optimizer_key(optimizer, self.trained)), make)

    def norm(self, gradients: Values) -> tuple[jax.Array, jax.Array]:
        """Return the squared norm of gradients, and whether all are finite."""
        return self._program("norm", lambda: _norm)(gradients)

    def add(self, total: Values, other: Values) -> Values:
        """Return the sum of two lists of gradients."""
        return self._program("add", lambda: lambda a, b: jax.tree.map(jnp.add, a, b))(total, other)

    def _program(self, key: Hashable, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        if key not in self._known:
            self._known[key] = self._backend.compile(make())
        return self._known[key]


def programs_of(model: keras.Model, name: str, device: jax.Device) -> NodePrograms:
    """Return the programs of a model: those of before, unless it was changed."""
    known = _programs.get(model)
    if known is None or known.platform != device.platform or known.signature != signature(model):
        known = _programs[model] = NodePrograms(model, name, device)
    return known


def is_float(leaf: jax.Array) -> bool:
    """Return True if an array can have a gradient."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _norm(gradients: Values) -> tuple[jax.Array, jax.Array]:
    wide = [gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32)) for gradient in gradients]
    squares = [jnp.sum(jnp.square(gradient)) for gradient in wide]
    finite = [jnp.all(jnp.isfinite(gradient)) for gradient in gradients]
    return jnp.sum(jnp.stack(squares)), jnp.all(jnp.stack(finite))

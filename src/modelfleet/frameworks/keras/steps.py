"""A Keras model's steps as pure functions of one member, for whichever backend this process has.

The functions take and return the values of all variables. The model's own variables are not changed. The numbers
equal those of Keras's own `train_step` and `test_step`, and the metrics have the names of its logs.
"""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import keras
import numpy as np
from keras import ops, tree

from modelfleet.errors import InputError
from modelfleet.frameworks.keras.metrics import naming_metrics
from modelfleet.frameworks.keras.optimizers import Update, built, left_unbuilt, twin
from modelfleet.frameworks.keras.structure import signature
from modelfleet.frameworks.keras.task import optimizer_key
from modelfleet.frameworks.stacked import Given
from modelfleet.types import Model, Tensor, Tree

Values = dict[str, Tensor]
Pairs = Sequence[tuple[keras.Variable, Tensor]]
"""Variables, and the values that they have within a scope."""


class Steps:
    """Steps of one built model, and of every model that has its structure and is compiled like it.

    To train or evaluate, the model must be compiled, and `build` must be called with a batch first: metrics have
    no variables before. `weights` are None, or `(row,)` numbers. If `can_mask_rows`, rows of weight 0 do not
    count.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.trained = list(model.trainable_variables)
        self.kept = list(model.non_trainable_variables)
        self.can_mask_rows = False
        self.apart: str | None = None
        """Why these are not the steps that Keras would take, as far as is known; see `_scope`."""
        # Of the present compile. An optimizer that is not built yet stays so until a step is taken.
        self.optimizer = _built_or_twin(model) if model.compiled and model.optimizer is not None else None
        self.update: Update | None = None
        self._first_optimizer_values: list[np.ndarray] = []  # the initial values of an optimizer's variables
        if self.optimizer is not None:
            self.update = Update(self.optimizer)
            if self.optimizer is not model.optimizer:
                self._first_optimizer_values = [_host(variable) for variable in self.update.variables]
        self._made_of = _made_of(model)
        # By index among all variables, which does not change if a layer is frozen in the middle of a fit.
        indices = {id(variable): index for index, variable in enumerate(model.variables)}
        self._indices = {
            "params": [indices[id(variable)] for variable in self.trained],
            "buffers": [indices[id(variable)] for variable in self.kept],
        }
        self.keys = {
            "params": structural_keys(self.trained),
            "buffers": structural_keys(self.kept),
            "optimizer": optimizer_keys(self.update.variables, self.trained) if self.update else [],
        }

    @property
    def stale(self) -> bool:
        """Return True if the model was changed or compiled again since these steps were made."""
        return self._made_of != _made_of(self.model)

    @property
    def scales_loss(self) -> bool:
        """Return True if the optimizer scales the loss, and itself skips gradients that are not finite."""
        return self.update is not None and self.update.scaling is not None

    @property
    def clips(self) -> bool:
        """Return True if the optimizer clips gradients."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        return any(getattr(inner, name, None) for name in ("clipnorm", "global_clipnorm", "clipvalue"))

    # --- state ---------------------------------------------------------------------------------------------------

    def state(self, model: keras.Model) -> dict[str, Values]:
        """Return the current values of a model of this structure, with new metrics."""
        values = {
            part: {key: variable.value for key, variable in found.items()}
            for part, found in self._variables(model).items()
        }
        if self.update is not None and not model.optimizer.built:
            first = map(ops.convert_to_tensor, self._optimizer_values_before(model))
            values["optimizer"] = dict(zip(self.keys["optimizer"], first, strict=True))
        return {**values, "metrics": self.fresh_metrics()}

    def write_back(self, model: keras.Model, state: Given) -> None:
        """Assign a state to a model: its weights, its seeds and its optimizer's variables."""
        if self.update is not None and not model.optimizer.built:
            own = zip(self.keys["optimizer"], self._optimizer_values_before(model), strict=True)
            if not all(np.array_equal(ops.convert_to_numpy(state["optimizer"][key]), value) for key, value in own):
                built(model)
        for part, found in self._variables(model).items():
            for key, variable in found.items():
                variable.assign(state[part][key])

    def build(self, batch: Tree) -> None:
        """Create the variables of the metrics for batches like this one."""
        if not self.model.compiled:
            return
        with left_unbuilt(self.model), naming_metrics():
            self.model._symbolic_build(data_batch=tuple(batch) if isinstance(batch, list) else batch)
        shapes = {name: tuple(value.shape) for name, value in self.results(self.fresh_metrics()).items()}
        for name, shape in shapes.items():
            if shape:
                raise InputError(
                    f"the metric {name!r} gives an array {shape}; a history holds single numbers. "
                    f"Let the metric give one, such as F1Score(average='macro')."
                )
        self.can_mask_rows = _can_mask_rows(self.model)

    def fresh_metrics(self) -> Values:
        """Return the metrics of one member before its first batch."""
        metrics = self.model.metrics_variables
        with keras.StatelessScope() as scope:
            self.model.reset_metrics()
        found = [scope.get_current_value(variable) for variable in metrics]
        return {
            key: variable.value if value is None else value
            for key, variable, value in zip(structural_keys(metrics), metrics, found, strict=True)
        }

    # --- steps ---------------------------------------------------------------------------------------------------

    def loss(
        self,
        params: Values,
        buffers: Values,
        metrics: Values,
        optimizer_values: Values,
        batch: Tree,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Values, Values]]:
        """Return the loss to differentiate, and (the loss itself, new buffers, new metrics) of a train step."""
        # Only an optimizer that scales the loss reads its variables here.
        own = self._pairs("optimizer", self._optimizer_variables, optimizer_values) if self.scales_loss else []
        mapping = [*self._mapping(params, buffers, metrics), *own]
        with self._scope(mapping, training=True) as scope:
            loss = self._forward(batch, weights, training=True)
            scaled = loss if self.optimizer is None else self.optimizer.scale_loss(loss)
        return scaled, (loss, _found(scope, self.keys["buffers"], self.kept), self._metrics(scope))

    def apply(
        self, params: Values, optimizer_values: Values, gradients: Mapping[str, Tensor | None]
    ) -> tuple[Values, Values]:
        """Return the params and the optimizer's values after one update. A gradient may be None, or missing."""
        assert self.update is not None
        names, keys = self.keys["params"], self.keys["optimizer"]
        own = [gradients.get(key) for key in names]
        values = [params[key] for key in names]
        new, new_optimizer_values = self.update([optimizer_values[key] for key in keys], own, self.trained, values)
        return dict(zip(names, new, strict=True)), dict(zip(keys, new_optimizer_values, strict=True))

    def evaluate(
        self, params: Values, buffers: Values, metrics: Values, batch: Tree, weights: Tensor | None = None
    ) -> tuple[Values, Values]:
        """Return the metrics with a batch added, and the buffers that the model has changed: seeds, counters."""
        with self._scope(self._mapping(params, buffers, metrics), training=False) as scope:
            self._forward(batch, weights, training=False)
        return self._metrics(scope), self._changed(scope)

    def results(self, metrics: Values) -> Values:
        """Return the loss and the metrics, by the names of Keras's logs."""
        with keras.StatelessScope(self._metrics_pairs(metrics)):
            return dict(self.model.get_metrics_result())

    def predict(self, params: Values, buffers: Values, x: Tree) -> tuple[Tree, Values]:
        """Return the model's outputs, and the buffers that the model has changed."""
        with self._scope(self._mapping(params, buffers, {}), training=False) as scope:
            found = _called(self.model, x, training=False)
        return found, self._changed(scope)

    def _changed(self, scope: "_Scope") -> Values:
        assigned = {id(variable) for variable in scope.assigned}
        pairs = zip(self.keys["buffers"], self.kept, strict=True)
        return {key: scope.get_current_value(v) for key, v in pairs if id(v) in assigned}

    @contextmanager
    def _scope(self, mapping: Pairs, *, training: bool) -> Iterator["_Scope"]:
        """Open a scope for a forward pass. If the model assigns a variable that a step would lose, set `apart`."""
        scope = _Scope(mapping, collect_losses=True)
        with scope:
            yield scope
        backend = keras.backend.backend()
        own = {id(variable) for variable in (*self.trained, *self.kept)}
        free = {id(variable) for variable in self.model.metrics_variables} if self.model.compiled else set()
        if training or backend != "torch":  # the torch engine does not keep changes by an evaluation
            free |= {id(variable) for variable in self.kept}
        if backend == "jax":  # on JAX, Keras's own steps also lose assignments to trained weights
            free |= {id(variable) for variable in self.trained}
        for variable in scope.assigned:
            # On torch, draws come from the member's stream and do not depend on the seed.
            drawn = backend == "torch" and variable.name == "seed_generator_state"
            if id(variable) in free or drawn:
                continue
            what = f"its forward changes {variable.path!r}, which is not part of the model"
            if id(variable) in own:
                trained = f"its forward assigns to the trained weight {variable.path!r}"
                what = trained if variable.trainable else f"evaluate and predict change its {variable.path!r}"
            self.apart = self.apart or what

    # --- helpers -------------------------------------------------------------------------------------------------

    def _forward(self, batch: Tree, weights: Tensor | None, *, training: bool) -> Tensor:
        """Return the loss of a batch. Changes of metrics and buffers stay in the scope."""
        model: Model = self.model  # compiled: it has a loss tracker
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        rows = next(leaf for leaf in tree.flatten(x) if leaf is not None).shape[0]
        y_pred = _called(model, x, training=training)
        if weights is None:
            loss = model._compute_loss(x, y, y_pred, sample_weight, training=training)
            model._loss_tracker.update_state(loss, sample_weight=rows)
            # A copy of the weights: on torch a masked metric writes to them, and the loss needs them later.
            own = None if sample_weight is None else tree.map_structure(ops.copy, sample_weight)
            logs = model.compute_metrics(x, y, y_pred, sample_weight=own)
            if isinstance(logs, Mapping) and not logs.keys() <= model.get_metrics_result().keys():
                self.apart = self.apart or "its compute_metrics returns more than the model's metrics"
            return loss
        wide = (
            "float64" if keras.backend.standardize_dtype(tree.flatten(y_pred)[0].dtype) == "float64" else "float32"
        )
        weights = ops.cast(weights, wide)
        real = ops.sum(weights)
        # The loss is a mean over all rows, padding included.
        share = weights * (rows / ops.maximum(real, 1.0))
        own = None if sample_weight is None else ops.cast(tree.flatten(sample_weight)[0], wide)
        loss = model._compute_loss(x, y, y_pred, share if own is None else _times(share, own), training=training)
        model._loss_tracker.update_state(loss, sample_weight=real)
        target, output = tree.flatten(y)[0], tree.flatten(y_pred)[0]
        for metric in _flat(model, "_flat_metrics"):
            metric.update_state(target, output, sample_weight=weights)
        for metric in _flat(model, "_flat_weighted_metrics"):
            metric.update_state(target, output, sample_weight=weights if own is None else _times(weights, own))
        return loss

    def _variables(self, model: keras.Model) -> dict[str, dict[str, keras.Variable]]:
        """Return a model's variables by part and key; no "optimizer" if the optimizer is not built yet."""
        variables = model.variables
        found = {part: [variables[index] for index in indices] for part, indices in self._indices.items()}
        if self.update is None or model.optimizer.built:
            found["optimizer"] = model.optimizer.variables if self.update is not None else []
        return {part: dict(zip(self.keys[part], own, strict=True)) for part, own in found.items()}

    def _optimizer_values_before(self, model: keras.Model) -> list[np.ndarray]:
        """Return the values that the optimizer's variables will have once built. Some exist already."""
        if not self._first_optimizer_values:  # the lane's first optimizer was built already
            first = _built_or_twin(model)
            if first is model.optimizer:
                return [_host(variable) for variable in first.variables]
            self._first_optimizer_values = [_host(variable) for variable in first.variables]
        own = list(model.optimizer.variables)
        found = []
        for variable, value in zip(self._optimizer_variables, self._first_optimizer_values, strict=True):
            known = own and own[0].name == variable.name  # variables that exist already come in the same order
            found.append(_host(own.pop(0)) if known else value)
        return found

    @property
    def _optimizer_variables(self) -> list[keras.Variable]:
        return [] if self.update is None else self.update.variables

    def _mapping(self, params: Values, buffers: Values, metrics: Values) -> list[tuple[keras.Variable, Tensor]]:
        own = [*self._pairs("params", self.trained, params), *self._pairs("buffers", self.kept, buffers)]
        return own + self._metrics_pairs(metrics) if metrics else own

    def _pairs(
        self, part: str, variables: Sequence[keras.Variable], values: Values
    ) -> list[tuple[keras.Variable, Tensor]]:
        # By key: JAX changes the order of a dict's keys.
        return [(variable, values[key]) for key, variable in zip(self.keys[part], variables, strict=True)]

    def _metrics_pairs(self, metrics: Values) -> list[tuple[keras.Variable, Tensor]]:
        variables = self.model.metrics_variables
        return [
            (variable, metrics[key]) for key, variable in zip(structural_keys(variables), variables, strict=True)
        ]

    def _metrics(self, scope: keras.StatelessScope) -> Values:
        variables = self.model.metrics_variables
        return _found(scope, structural_keys(variables), variables)


class _Scope(keras.StatelessScope):
    """A stateless scope that remembers which variables were assigned within it."""

    def __init__(self, mapping: Pairs, *, collect_losses: bool = False) -> None:
        super().__init__(mapping, collect_losses=collect_losses)
        self.assigned: list[keras.Variable] = []

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        """Record an assignment. The variable itself is not changed."""
        self.assigned.append(update[0])
        super().add_update(update)


def outputs(model: keras.Model, mapping: Pairs, x: Tree) -> Tree:
    """Return a model's outputs with other values for some of its variables. Its assignments are dropped."""
    with keras.StatelessScope(mapping):
        return _called(model, x, training=False)


def _built_or_twin(model: keras.Model) -> keras.optimizers.Optimizer:
    """Return a model's optimizer if it is built, else a built copy. If it can't be copied, build it."""
    optimizer = model.optimizer
    if optimizer.built:
        return optimizer
    with suppress(Exception):  # a user's own class may not be able to describe itself
        other, trained = twin(optimizer), model.trainable_variables
        if optimizer_key(other, trained) == optimizer_key(optimizer, trained):
            other.build(trained)
            return other
    built(model)
    return optimizer


def _host(variable: keras.Variable) -> np.ndarray:
    return np.array(ops.convert_to_numpy(variable.value))


def _made_of(model: keras.Model) -> tuple[Hashable, ...]:
    """Return a key that changes when a model is changed or compiled again."""
    if not model.compiled:
        return signature(model), ()
    return signature(model), tuple(map(id, (model.optimizer, model._compile_loss, model._compile_metrics)))


def _called(model: keras.Model, x: Tree, *, training: bool) -> Tree:
    return model(x, training=training) if model._call_has_training_arg else model(x)


def _can_mask_rows(model: keras.Model) -> bool:
    """Return True if row weights remove the influence of padding on the loss and all metrics exactly."""
    kind = type(model)
    own = any(
        getattr(kind, name) is not getattr(keras.Model, name) for name in ("compute_loss", "compute_metrics")
    )
    loss = model._compile_loss
    if own or loss is None or len(loss._flat_losses or ()) != 1:
        return False
    function = loss._flat_losses[0].loss
    by_rows = isinstance(function, keras.losses.Loss) and function.reduction == "sum_over_batch_size"
    layers = model._flatten_layers()
    sees_padding = any(
        layer.activity_regularizer is not None or getattr(layer, "mask_zero", False) for layer in layers
    )
    sees_padding = sees_padding or any(isinstance(layer, keras.layers.Masking) for layer in layers)
    outputs = getattr(model, "outputs", None) or []
    flat = len(outputs) == 1 and len(outputs[0].shape) == 2
    others = [m for m in model.metrics if m is not model._loss_tracker and m is not model._compile_metrics]
    return by_rows and flat and not sees_padding and not others


def _flat(model: keras.Model, which: str) -> list[keras.metrics.Metric]:
    lists = [] if model._compile_metrics is None else getattr(model._compile_metrics, which)
    return [metric for some in lists if some for metric in some.metrics]


def _times(weights: Tensor, own: Tensor) -> Tensor:
    """Return row weights times sample weights, which may be `(row, 1)`."""
    return weights * ops.reshape(own, weights.shape)


def _found(scope: keras.StatelessScope, keys: Sequence[str], variables: Sequence[keras.Variable]) -> Values:
    return {key: scope.get_current_value(variable) for key, variable in zip(keys, variables, strict=True)}


def structural_keys(variables: Sequence[keras.Variable]) -> list[str]:
    """Return keys that are equal for all models of a structure: names without Keras's numbers."""
    return [f"{index:03}.{re.sub(r'_[0-9]+$', '', variable.name)}" for index, variable in enumerate(variables)]


def by_key(variables: Sequence[keras.Variable]) -> dict[str, keras.Variable]:
    """Return variables by their structural keys."""
    return dict(zip(structural_keys(variables), variables, strict=True))


def optimizer_keys(variables: Sequence[keras.Variable], trained: Sequence[keras.Variable]) -> list[str]:
    """Return keys for an optimizer's variables that are equal for all models of a structure."""
    # Keras names a variable of an optimizer after the path of the trained one, with the layer's name in it.
    prefixes = {f"{variable.path.replace('/', '_')}_": f"{index:03}_" for index, variable in enumerate(trained)}
    names = []
    for index, variable in enumerate(variables):
        prefix = max((p for p in prefixes if variable.name.startswith(p)), key=len, default="")
        # Nadam's product has a name that Keras numbers.
        rest = re.sub(r"_[0-9]+$", "", variable.name[len(prefix) :])
        names.append(f"{index:03}.{prefixes.get(prefix, '')}{rest}")
    return names

"""What `fleet.compile` becomes for Keras models, and which models have one task."""

from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

import modelfleet as mf
from modelfleet.errors import InputError
from modelfleet.frameworks import keras as adapter
from modelfleet.frameworks.keras.recipe import compile, prepare
from modelfleet.members import Member
from modelfleet.recipe import Recipe
from modelfleet.types import Kind


def members(count: int = 2, **options: Any) -> list[Member]:
    return [Member(str(index), models.mlp(**options), index, adapter) for index in range(count)]


def tasks(own: list[Member], kind: Kind = "train") -> list[Any]:
    return list(prepare(None, own, kind).tasks)


def test_every_member_has_an_optimizer_of_its_own() -> None:
    own = members()
    rates = mf.each({"0": 0.1, "1": 0.2})
    compile(Recipe("adam", "cross_entropy", metrics=["accuracy"], hyperparameters={"lr": rates}), own)
    first, second = (member.model.optimizer for member in own)
    assert isinstance(first, keras.optimizers.Adam)
    assert first is not second
    assert [float(o.learning_rate) for o in (first, second)] == pytest.approx([0.1, 0.2])
    assert tasks(own)[0] is tasks(own)[1]  # rates are no part of a task


def test_an_optimizer_of_keras_is_cloned() -> None:
    given = keras.optimizers.SGD(0.3, momentum=0.5)
    own = members()
    compile(Recipe(given, "mse", hyperparameters={"nesterov": True}), own)
    for member in own:
        assert member.model.optimizer is not given
        assert member.model.optimizer.momentum == 0.5
        assert member.model.optimizer.nesterov
        assert float(member.model.optimizer.learning_rate) == pytest.approx(0.3)


def test_options_become_kerass_own() -> None:
    own = members(1)
    options = {"lr": 1, "betas": (0.8, 0.9), "eps": 1e-3, "loss_weights": [2.0]}
    compile(Recipe("adamw", "mse", clip_norm=0.5, hyperparameters=options), own)
    optimizer = own[0].model.optimizer
    assert (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon) == (0.8, 0.9, 1e-3)
    assert optimizer.global_clipnorm == 0.5


def test_a_schedule_is_part_of_the_task() -> None:
    def compiled(rate: float) -> list[Member]:
        own = members(1)
        compile(Recipe("sgd", "mse", schedule=keras.optimizers.schedules.ExponentialDecay(rate, 10, 0.9)), own)
        return own

    assert tasks(compiled(0.1))[0] is tasks(compiled(0.1))[0]
    assert tasks(compiled(0.1))[0] is not tasks(compiled(0.2))[0]


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "sgd"},
        {"optimizer": keras.optimizers.Adam(beta_1=0.5)},
        {"loss": "mae"},
        {"loss": keras.losses.Huber()},
        {"metrics": ["mae"]},
        {"loss_weights": [3.0]},
        {"weighted_metrics": ["mae"]},
    ],
)
def test_models_compiled_otherwise_have_another_task(change: dict[str, Any]) -> None:
    first, second, third = members(3)
    first.model.compile(optimizer="adam", loss="mse")
    second.model.compile(optimizer=keras.optimizers.Adam(0.5), loss="mse")
    third.model.compile(**{"optimizer": "adam", "loss": "mse", **change})
    found = tasks([first, second, third])
    assert found[0] is found[1]
    assert found[2] is not found[0]
    assert found[2].summary != found[0].summary


def test_metrics_given_as_objects_are_not_shared() -> None:
    own = members()
    compile(Recipe("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError(name="far")]), own)
    told = [member.model._compile_metrics._user_metrics[0] for member in own]
    assert told[0] is not told[1]
    assert told[0].name == "far"


def test_an_uncompiled_model_can_only_predict() -> None:
    own = members(1)
    assert tasks(own, "predict")
    for kind in ("train", "evaluate"):
        with pytest.raises(InputError, match=r"member '0' is not compiled.*model\.compile.*fleet\.compile"):
            tasks(own, kind)


def test_a_model_with_a_train_step_of_its_own_has_a_task_of_its_own() -> None:
    class Custom(keras.Sequential):
        def train_step(self, *args: Any) -> Any:
            return super().train_step(*args)

    own = members()
    for member in own:
        member.model = Custom([keras.Input((4,)), keras.layers.Dense(1)])
        member.model.compile("sgd", "mse")
    first, second = tasks(own)
    assert first.plain == "Custom overrides train_step"
    assert first is not second
    assert tasks(own)[0] is first


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe("adamm", "mse"), "unknown optimizer 'adamm'. Did you mean 'adam'"),
        (Recipe("adam", "mse", precision="bf16"), "mixed_bfloat16"),
        (Recipe("adam", objective=lambda model, batch: 0), "compute_loss"),
        (Recipe("adam", "mse", schedule="cosine"), "LearningRateSchedule"),
        (Recipe("adam", "mse", hyperparameters={"lr": -1.0}), "lr of member '0' is -1.0"),
        (Recipe("adam", "mse", hyperparameters={"speed": 3}), "speed"),
        (Recipe(3, "mse"), "Give a name"),
        (Recipe("adam", "mse", hyperparameters={"lr": mf.each([1.0])}), "2 members"),
    ],
)
def test_what_can_not_be_is_refused_and_changes_nothing(recipe: Recipe, message: str) -> None:
    own = members()
    with pytest.raises(InputError, match=message):
        compile(recipe, own)
    assert not any(member.model.compiled for member in own)


def test_logits_are_right_on_their_side_of_0() -> None:
    x, _ = models.data(12)
    fleet = mf.Fleet([models.mlp(outputs=1)])
    fleet.compile("sgd", "bce_with_logits", metrics=["accuracy"])
    y = (x[:, :1] > 0).astype(np.float32)
    expected = np.mean((fleet.predict(x)["0"] > 0) == (y > 0))
    assert fleet.evaluate((x, y))["0"]["accuracy"] == pytest.approx(expected)


def test_what_a_task_can_not_look_into_keeps_members_apart() -> None:
    class Slow(keras.optimizers.SGD):  # and says nothing of it in its config
        def __init__(self, share: float) -> None:
            super().__init__(0.1)
            self.share = share

    class Off(keras.metrics.Metric):
        def __init__(self, limit: float) -> None:
            super().__init__()
            self.limit = limit

        def result(self) -> Any:
            return self.limit

    def pulled(variable: Any) -> Any:
        return lambda y, p: keras.ops.mean(keras.ops.square(y - p)) + variable

    def found(**first: Any) -> Any:
        member = members(1)[0]
        member.model.compile(**{"optimizer": "sgd", "loss": "mse", **first})
        return tasks([member])[0]

    own = [keras.Variable(1.0), keras.Variable(1.0)]
    assert found(optimizer=Slow(0.5)) is found(optimizer=Slow(0.5))
    assert found(optimizer=Slow(0.5)) is not found(optimizer=Slow(0.25))
    assert found(metrics=[Off(0.5)]) is found(metrics=[Off(0.5)])  # though Keras numbers their names
    assert found(metrics=[Off(0.5)]) is not found(metrics=[Off(0.25)])
    assert found(loss=pulled(own[0])) is found(loss=pulled(own[0]))
    assert found(loss=pulled(own[0])) is not found(loss=pulled(own[1]))
    teacher = [models.mlp(seed=seed) for seed in (0, 0)]
    assert found(loss=pulled(teacher[0])) is not found(loss=pulled(teacher[1]))


def own_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.square(y_true - y_pred)


def edited_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.abs(y_true - y_pred)


class OwnLoss(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.square(y_true - y_pred)


class EditedLoss(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.abs(y_true - y_pred)


edited_loss.__name__ = edited_loss.__qualname__ = "own_loss"  # as in a script that was edited meanwhile
EditedLoss.__name__ = EditedLoss.__qualname__ = "OwnLoss"
EditedLoss.call.__qualname__ = "OwnLoss.call"


@pytest.mark.parametrize(("loss", "edited"), [(own_loss, edited_loss), (OwnLoss(), EditedLoss())])
@pytest.mark.parametrize("eager", [False, True])
def test_an_edited_loss_is_another_task_for_a_checkpoint(loss: Any, edited: Any, eager: bool) -> None:
    def summary(loss: Any) -> str:
        (own,) = members(1)
        own.model.compile("sgd", loss, run_eagerly=eager)
        return tasks([own])[0].summary

    assert summary(loss) == summary(loss)
    assert summary(loss) != summary(edited)

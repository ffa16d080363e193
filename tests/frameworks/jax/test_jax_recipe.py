"""What `compile` takes for JAX models, and what it refuses."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import modelfleet as mf
from modelfleet.errors import InputError
from modelfleet.frameworks import jax as adapter
from modelfleet.frameworks.jax import optimizers
from modelfleet.members import Member
from modelfleet.recipe import Recipe

NAMES = ["a", "b", "c"]


def members() -> list[Member]:
    return [Member(name, ({"w": np.ones(2)}, lambda p, x: x), 0, adapter) for name in NAMES]


def resolve(optimizer: Any, schedule: Any = None, **given: Any) -> Any:
    return optimizers.resolve(optimizer, schedule, given, NAMES)


def test_rates_are_each_members_own() -> None:
    found, own = resolve("adam", lr=mf.each([1, 2, 3]), b1=0.8)
    assert found[0] is found[1] is found[2]
    assert [row["learning_rate"] for row in own] == [1, 2, 3]
    params = {"w": jnp.ones(2)}
    state = found[0].state(params, own[1])
    updates, _ = found[0].transformation.update(params, state, params)
    plain = optax.adam(2.0, b1=0.8)
    expected: Any = plain.update(params, plain.init(params), params)[0]
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
    assert set(state.values) == {"learning_rate"}  # the others are constants of the program


def test_numbers_by_each_are_in_the_state_and_switches_part_members() -> None:
    found, own = resolve("sgd", lr=0.1, momentum=mf.each([0.5, 0.6, 0.7]))
    assert found[0] is found[2]
    assert own[1]["momentum"] == 0.6
    found, _ = resolve("sgd", momentum=0.9, nesterov=mf.each([True, False, True]))
    assert found[0] is found[2]
    assert found[0] is not found[1]
    found, own = resolve("adamw", betas=mf.each([(0.9, 0.99), (0.8, 0.99), (0.7, 0.9)]))
    assert found[0] is found[1]
    assert (own[1]["b1"], own[2]["b2"]) == (0.8, 0.9)


def test_optimizers_come_as_names_functions_and_transformations() -> None:
    made = optax.adam(1e-3)
    found, own = resolve(made)
    assert found[0] is found[1]
    assert own[0] == {}
    found, _ = resolve(mf.each([made, optax.sgd(0.1), made]))
    assert found[0] is found[2]
    assert found[0] is not found[1]
    found, own = resolve(lambda lr: optax.chain(optax.clip(1.0), optax.sgd(lr)), lr=mf.each([1, 2, 3]))
    assert found[0] is found[2]
    assert own[2] == {"lr": 3}
    found, own = resolve(optax.lion, lr=0.5)
    assert own[0] == {"learning_rate": 0.5}
    found, _ = resolve(mf.each(["sgd", "adam", "sgd"]))
    assert found[0] is found[2]


def test_a_schedule_of_optax_gives_the_rate() -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    found, own = resolve("sgd", schedule)
    assert own[0] == {}
    params = {"w": jnp.ones(2)}
    state = found[0].state(params, {})
    for expected in (1.0, 0.9):
        updates, state = found[0].transformation.update(params, state, params)
        np.testing.assert_allclose(updates["w"], -expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"optimizer": "adm"}, "unknown optimizer 'adm'. Did you mean 'adam'"),
        ({"optimizer": 3}, "optimizer 3 is not one of Optax"),
        (
            {"hyperparameters": {"momentom": 0.9}},
            "unknown hyperparameter of sgd 'momentom'. Did you mean 'momentum'",
        ),
        ({"hyperparameters": {"lr": -1}}, "lr is -1, expected a finite number, 0 or more"),
        ({"hyperparameters": {"lr": "0.1"}}, "lr is '0.1', expected a finite number, 0 or more"),
        ({"hyperparameters": {"betas": 0.9}}, "betas is 0.9, expected two numbers"),
        ({"hyperparameters": {"lr": mf.each([1, 2])}}, "lr: each.* has 2 values, but the fleet has 3 members"),
        (
            {"optimizer": optax.sgd(1.0), "hyperparameters": {"lr": 1}},
            "compile got lr beside a finished optimizer",
        ),
        ({"schedule": "cosine"}, "expected a schedule of Optax"),
        ({"schedule": optax.constant_schedule(1), "hyperparameters": {"lr": 1}}, "both lr and a schedule"),
        ({"loss": None}, "neither a loss nor an objective"),
        ({"objective": len}, "both a loss and an objective"),
        ({"loss": None, "objective": len, "metrics": ["mse"]}, "metrics beside an objective"),
        ({"precision": "fp16"}, "is not for JAX models: its gradients need a loss scale"),
        ({"precision": "int8"}, "unknown precision 'int8'"),
        ({"clip_norm": 0}, "clip_norm of member 'a' is 0; expected a number above 0"),
    ],
)
def test_what_does_not_fit_is_refused(recipe: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {"optimizer": "sgd", "loss": "mse", **recipe}
    with pytest.raises(InputError, match=message):
        adapter.compile(Recipe(**whole), members())


def test_predicting_needs_no_recipe() -> None:
    prepared = adapter.prepare(None, members(), "predict")
    assert len({id(task) for task in prepared.tasks}) == 1
    with pytest.raises(InputError, match="call compile before fit: member 'a'"):
        adapter.prepare(None, members(), "train")


def test_equal_recipes_make_equal_tasks() -> None:
    first, second = (
        adapter.prepare(Recipe("sgd", "mse", hyperparameters={"lr": rate}), members(), "train")
        for rate in (0.1, 0.2)
    )
    assert first.tasks[0] == second.tasks[0]  # so that programs serve both
    assert first.tasks[0].summary == "sgd, mse, float32"
    assert first.columns == {}


def _own_loss(output: Any, target: Any) -> Any:
    return jnp.mean((output - target) ** 2)


def _edited_loss(output: Any, target: Any) -> Any:
    return jnp.mean(jnp.abs(output - target))


def _own_objective(model: Any, batch: Any) -> Any:
    return _own_loss(model[1](model[0], batch[0]), batch[1])


def _edited_objective(model: Any, batch: Any) -> Any:
    return 2 * _own_loss(model[1](model[0], batch[0]), batch[1])


for _edited, _name in ((_edited_loss, "_own_loss"), (_edited_objective, "_own_objective")):
    _edited.__name__ = _edited.__qualname__ = _name  # the same function, in a script that was edited meanwhile


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"loss": _own_loss}, {"loss": _edited_loss}),
        ({"objective": _own_objective}, {"objective": _edited_objective}),
    ],
    ids=["loss", "objective"],
)
def test_a_run_does_not_go_on_with_an_edited_loss(first: Any, then: Any, tmp_path: Path) -> None:
    data = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)

    def run(told: Any) -> None:
        fleet = mf.Fleet([({"w": jnp.ones((3, 2))}, lambda params, x: x @ params["w"])])
        fleet.compile("sgd", lr=0.1, **told)
        fleet.fit(data, epochs=1, progress=False, callbacks=[mf.Checkpoint(tmp_path)])

    run(first)
    run(first)
    with pytest.raises(mf.StoreError, match="checkpoint of another run: its tasks are"):
        run(then)

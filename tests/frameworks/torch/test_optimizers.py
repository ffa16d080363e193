"""Every optimizer, stacked, against the torch.optim class of its name, one instance per member."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.each import each, per_member
from modelfleet.errors import InputError
from modelfleet.frameworks.torch.optimizers.hyperparameters import SWITCHES, columns, resolve, static_flags
from modelfleet.frameworks.torch.optimizers.stacked import Optimizer
from modelfleet.testing.torch import OPTIMIZERS

NAMES = ("a", "b", "c")
STEPS = 20
SHAPES = {"weight": (5, 3), "scale": (), "kernel": (2, 1, 7)}
CLASSES = {name: kind for name, kind in OPTIMIZERS.items() if name != "lion"}
BETAS = each([(0.9, 0.999), (0.3, 0.9), (0.8, 0.5)])
DECAY = each([0.0, 0.01, 0.1])
MOMENTUM = each([0.0, 0.9, 0.5])
LR = each([1e-3, 1e-2, 3e-2])

# Where a hyperparameter can be 0, it is for one member and not for the others.
TABLE: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"weight_decay": DECAY, "maximize": True}),
    ("sgd", {"momentum": MOMENTUM, "dampening": each([0.5, 0.3, 0.0]), "weight_decay": DECAY}),
    ("sgd", {"momentum": each([0.1, 0.9, 0.5]), "nesterov": True, "weight_decay": DECAY}),
    ("adam", {}),
    ("adam", {"betas": BETAS, "eps": each([1e-8, 1e-6, 1e-2]), "weight_decay": DECAY}),
    ("adam", {"betas": BETAS, "amsgrad": True, "maximize": True, "weight_decay": DECAY}),
    ("adam", {"betas": BETAS, "decoupled_weight_decay": True, "weight_decay": DECAY}),
    ("adamw", {}),
    ("adamw", {"betas": BETAS, "amsgrad": True, "maximize": True, "weight_decay": DECAY}),
    ("rmsprop", {"eps": 1e-6}),
    ("rmsprop", {"alpha": each([0.99, 0.9, 0.3]), "momentum": MOMENTUM, "weight_decay": DECAY}),
    ("rmsprop", {"centered": True, "momentum": MOMENTUM, "maximize": True}),
    ("rmsprop", {"centered": True, "weight_decay": DECAY}),
    ("adagrad", {"initial_accumulator_value": each([0.0, 0.1, 2.0]), "lr_decay": each([0.0, 0.1, 0.5])}),
    ("adagrad", {"weight_decay": DECAY, "maximize": True}),
    ("adadelta", {"rho": each([0.9, 0.5, 0.0]), "weight_decay": DECAY}),
    ("adadelta", {"maximize": True}),
    ("nadam", {"betas": BETAS, "momentum_decay": each([4e-3, 0.0, 0.5]), "weight_decay": DECAY}),
    ("nadam", {"decoupled_weight_decay": True, "maximize": True, "weight_decay": DECAY}),
    ("radam", {"betas": BETAS, "weight_decay": DECAY}),
    ("radam", {"decoupled_weight_decay": True, "maximize": True, "weight_decay": DECAY}),
    ("adamax", {"betas": BETAS, "weight_decay": DECAY}),
    ("adamax", {"maximize": True}),
]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def start(members: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: values((members, *shape), dtype, seed) for seed, (name, shape) in enumerate(SHAPES.items())}


def gradients(members: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return [
        {
            name: values((members, *shape), dtype, 100 * step + seed)
            for seed, (name, shape) in enumerate(SHAPES.items())
        }
        for step in range(1, STEPS + 1)
    ]


def tensors(hyper: dict[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(column) for name, column in columns(hyper, names).items()}


def run(
    optimizer: Optimizer,
    hyper: Mapping[str, Tensor],
    params: dict[str, Tensor],
    grads: list[dict[str, Tensor]],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    moments = {name: optimizer.initial(param, hyper) for name, param in params.items()}
    for index, grad in enumerate(grads):
        step = torch.full((len(hyper["lr"]),), index + 1, dtype=torch.float64)
        coefficients = optimizer.coefficients(hyper, step)
        assert all(value.dtype == torch.float64 for value in coefficients.values())
        after = {name: optimizer.apply(params[name], grad[name], moments[name], coefficients) for name in params}
        params = {name: param for name, (param, _) in after.items()}
        moments = {name: part for name, (_, part) in after.items()}
    return params, moments


def own(value: Any, row: int) -> Any:
    return per_member(value, NAMES, "")[row]


def run_torch(
    name: str, given: dict[str, Any], row: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    params = {key: torch.nn.Parameter(value[row]) for key, value in start(len(NAMES), dtype).items()}
    settings = {key: own(value, row) for key, value in given.items()}
    optimizer = CLASSES[name](params.values(), foreach=False, **settings)
    for grad in gradients(len(NAMES), dtype):
        for key, param in params.items():
            param.grad = grad[key][row]
        optimizer.step()
    return {key: param.data for key, param in params.items()}, {
        key: optimizer.state[param] for key, param in params.items()
    }


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> Any:
    # NAdam's running product has the default dtype in torch, whatever the parameter's.
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "given"), TABLE, ids=[f"{name}-{'-'.join(given)}" for name, given in TABLE])
def test_each_member_steps_as_in_torch(name: str, given: dict[str, Any], dtype: torch.dtype) -> None:
    given = {"lr": LR, **given}
    optimizer, hyper = resolve(name, given)
    params, moments = run(optimizer, tensors(hyper, NAMES), start(len(NAMES), dtype), gradients(len(NAMES), dtype))
    most = 1e-12 if dtype == torch.float64 else 2e-6
    for row in range(len(NAMES)):
        expected, state = run_torch(name, given, row, dtype)
        for key in SHAPES:
            assert params[key].dtype == dtype
            assert difference(params[key][row], expected[key]) < most
            assert set(moments[key]) == set(optimizer.tensor_names)
            # torch keeps no buffer for a member without momentum
            torchs = {part: tensor for part, tensor in state[key].items() if tensor is not None}
            for part in torchs.keys() & set(optimizer.tensor_names):
                assert difference(moments[key][part][row], torchs[part]) < 10 * most


def test_lion_steps_as_in_its_paper() -> None:
    lr, decay, betas = [1e-4, 1e-3, 1e-2], [0.0, 0.1, 1.0], [(0.9, 0.99), (0.95, 0.98), (0.5, 0.9)]
    optimizer, hyper = resolve("lion", {"lr": each(lr), "weight_decay": each(decay), "betas": each(betas)})
    grads = gradients(len(NAMES), torch.float64)
    params, moments = run(optimizer, tensors(hyper, NAMES), start(len(NAMES), torch.float64), grads)
    for row in range(len(NAMES)):
        for key, value in start(len(NAMES), torch.float64).items():
            theta, momentum = value[row].numpy(), np.zeros(SHAPES[key])
            for grad in grads:
                g = grad[key][row].numpy()
                update = np.sign(betas[row][0] * momentum + (1 - betas[row][0]) * g)
                theta = theta - lr[row] * (update + decay[row] * theta)
                momentum = betas[row][1] * momentum + (1 - betas[row][1]) * g
            np.testing.assert_allclose(params[key][row].numpy(), theta, rtol=1e-12)
            np.testing.assert_allclose(moments[key]["exp_avg"][row].numpy(), momentum, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "given"),
    [*TABLE, ("lion", {"weight_decay": DECAY})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_members_numbers_are_the_same_whoever_its_neighbours_are(name: str, given: dict[str, Any]) -> None:
    given = {"lr": LR, **given}
    optimizer, hyper = resolve(name, given)
    grads = gradients(len(NAMES), torch.float32)
    together, _ = run(optimizer, tensors(hyper, NAMES), start(len(NAMES), torch.float32), grads)
    for row, member in enumerate(NAMES):
        # Alone, a member without momentum or weight decay gets a shorter algorithm than in the fleet.
        alone, hyper = resolve(name, {key: own(value, row) for key, value in given.items()})
        params = {key: value[row : row + 1] for key, value in start(len(NAMES), torch.float32).items()}
        just = [{key: value[row : row + 1] for key, value in grad.items()} for grad in grads]
        result, _ = run(alone, tensors(hyper, [member]), params, just)
        for key in SHAPES:
            # Not bit for bit: how a processor rounds the end of a row may differ from its middle.
            torch.testing.assert_close(result[key][0], together[key][row], rtol=1e-6, atol=1e-7)


def test_members_may_be_at_different_steps() -> None:
    optimizer, hyper = resolve("adam", {"lr": LR})
    hypers = tensors(hyper, NAMES)
    early = optimizer.coefficients(hypers, torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64))
    late = optimizer.coefficients(hypers, torch.tensor([9.0, 9.0, 9.0], dtype=torch.float64))
    mixed = optimizer.coefficients(hypers, torch.tensor([1.0, 9.0, 1.0], dtype=torch.float64))
    for name, value in mixed.items():
        assert value.tolist() == [early[name][0], late[name][1], early[name][2]]


@pytest.mark.parametrize("name", [*CLASSES, "lion"])
def test_a_step_changes_nothing_in_place_and_traces_into_one_graph(name: str) -> None:
    optimizer, hyper = resolve(name, {"weight_decay": 0.1})
    hypers = tensors(hyper, NAMES)
    param, grad = values((3, 4), torch.float32, 0), values((3, 4), torch.float32, 1)
    moments = optimizer.initial(param, hypers)

    def step(
        param: Tensor, grad: Tensor, moments: dict[str, Tensor], at: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return optimizer.apply(param, grad, moments, optimizer.coefficients(hypers, at))

    before = [tensor.clone() for tensor in (param, grad, *moments.values())]
    first = torch.ones(3, dtype=torch.float64)
    graph = make_fx(step)(param, grad, moments, first)
    assert all(torch.equal(a, b) for a, b in zip(before, (param, grad, *moments.values()), strict=True))
    # The graph traced at the first step is right for every other one: nothing branches on the step.
    later = torch.tensor([1.0, 7.0, 500.0], dtype=torch.float64)
    traced, plain = graph(param, grad, moments, later), step(param, grad, moments, later)
    assert torch.equal(traced[0], plain[0])
    assert all(torch.equal(traced[1][part], plain[1][part]) for part in optimizer.tensor_names)
    # What a step returns can go into the next one without a new graph.
    assert {k: (v.dtype, v.shape) for k, v in plain[1].items()} == {
        k: (v.dtype, v.shape) for k, v in moments.items()
    }


@pytest.mark.parametrize(("name", "torch_class"), CLASSES.items())
def test_names_and_defaults_are_those_of_torch(name: str, torch_class: type) -> None:
    parameters = inspect.signature(torch_class).parameters.values()
    theirs = {p.name: p.default for p in parameters if p.name not in {"params", *SWITCHES}}
    optimizer, hyper = resolve(torch_class, {})
    assert {**hyper, **optimizer.flags} == theirs
    assert optimizer.torch_class is torch_class
    assert resolve(name, {}) == (optimizer, hyper)


@pytest.mark.parametrize("spelling", ["AdamW", "adam_w", "ADAMW", torch.optim.AdamW])
def test_an_optimizer_has_many_spellings(spelling: str | type) -> None:
    optimizer, hyper = resolve(spelling, {"lr": 0.5, "foreach": True, "fused": False})
    assert optimizer.name == "adamw"
    assert hyper == {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def test_a_partials_keywords_are_defaults() -> None:
    make = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9, nesterov=True)
    optimizer, hyper = resolve(make, {"lr": each([1, 2])})
    assert optimizer.flags == {"nesterov": True, "maximize": False}
    assert columns(hyper, ["x", "y"])["lr"].tolist() == [1, 2]
    assert columns(hyper, ["x", "y"])["momentum"].tolist() == [0.9, 0.9]
    assert [flags["nesterov"] for flags in static_flags(make, {}, ["x", "y"])] == [True, True]
    with pytest.raises(InputError, match="by name"):
        resolve(functools.partial(torch.optim.SGD, [], 0.5), {})


def test_tensors_are_kept_only_where_something_uses_them() -> None:
    assert resolve("sgd", {})[0].tensor_names == ()
    assert resolve("sgd", {"momentum": each([0.0, 0.9])})[0].tensor_names == ("step", "momentum_buffer")
    assert resolve("rmsprop", {"centered": True})[0].tensor_names == ("step", "square_avg", "grad_avg")
    adam = resolve("adam", {})[0]
    assert adam.tensor_names == ("step", "exp_avg", "exp_avg_sq")
    assert replace(adam, flags={**adam.flags, "amsgrad": True}).tensor_names == (
        "step",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
    )


def test_flags_may_be_one_per_member() -> None:
    given = {"amsgrad": each({"b": True, "a": False}), "maximize": True}
    assert static_flags("adam", given, ["a", "b"]) == [
        {"amsgrad": False, "decoupled_weight_decay": False, "maximize": True},
        {"amsgrad": True, "decoupled_weight_decay": False, "maximize": True},
    ]
    assert resolve("adam", given)[0].flags["amsgrad"] is False


def test_columns_split_betas_and_spread_each() -> None:
    arrays = columns({"lr": each({"b": 2, "a": 1}), "betas": each([(0.1, 0.2), [0.3, 0.4]])}, ["a", "b"])
    assert {name: column.tolist() for name, column in arrays.items()} == {
        "lr": [1, 2],
        "beta1": [0.1, 0.3],
        "beta2": [0.2, 0.4],
    }
    assert all(column.dtype == np.float64 for column in arrays.values())


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("lr", -0.1, "member 'b': lr is -0.1, expected a finite number, 0 or more"),
        ("lr", float("nan"), "member 'b': lr is nan"),
        ("lr", float("inf"), "member 'b': lr is inf"),
        ("lr", "fast", "member 'b': lr is 'fast', expected a number"),
        ("lr", None, "member 'b': lr is None, expected a number"),
        ("eps", -1e-8, "member 'b': eps is -1e-08"),
        ("weight_decay", -1, "member 'b': weight_decay is -1"),
        ("momentum", -0.5, "member 'b': momentum is -0.5"),
        ("rho", 1.1, "member 'b': rho is 1.1, expected a number from 0 to 1"),
        ("betas", (0.9, 1.0), "member 'b': beta2 is 1.0, expected a number from 0 to below 1"),
        ("betas", (-0.1, 0.9), "member 'b': beta1 is -0.1"),
        ("betas", 0.9, "member 'b': betas is 0.9, expected 2 numbers"),
        ("betas", (0.9,), r"member 'b': betas is \(0.9,\), expected 2 numbers"),
    ],
)
def test_a_bad_value_is_named_with_its_member(name: str, value: object, told: str) -> None:
    fine = (0.9, 0.99) if name == "betas" else 0.5
    with pytest.raises(InputError, match=told):
        columns({name: each([fine, value])}, ["a", "b"])


def test_bad_names_are_named_with_the_nearest_right_one() -> None:
    with pytest.raises(InputError, match="Did you mean 'adam'"):
        resolve("adaam", {})
    with pytest.raises(InputError, match=r"hyperparameter of adam 'weight_decy'. Did you mean 'weight_decay'"):
        resolve("adam", {"weight_decy": 0.1})
    with pytest.raises(InputError, match="hyperparameter of adam 'momentum'"):
        resolve("adam", {"momentum": 0.9})
    with pytest.raises(InputError, match=r"ASGD is not available in fleets. Give one of adadelta, adagrad"):
        resolve(torch.optim.ASGD, {})
    with pytest.raises(InputError, match="amsgrad of adam is 'yes', expected True or False"):
        resolve("adam", {"amsgrad": "yes"})
    with pytest.raises(InputError, match="member 'b': amsgrad of adam is 3"):
        static_flags("adam", {"amsgrad": each([True, 3])}, ["a", "b"])


@pytest.mark.parametrize(
    "given", [{}, {"momentum": each([0.9, 0])}, {"momentum": 0.9, "dampening": each([0, 0.1])}]
)
def test_nesterov_without_what_it_needs_is_refused_as_in_torch(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="Nesterov needs a momentum above 0 and no dampening"):
        static_flags("sgd", {"nesterov": True, **given}, ["a", "b"])


def test_a_subclass_is_not_taken_for_its_parent() -> None:
    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(InputError, match="Mine is not available in fleets"):
        resolve(Mine, {})

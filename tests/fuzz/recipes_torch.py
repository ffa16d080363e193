"""What users give to `compile` for torch models: losses, objectives, optimizers and schedules, by name."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from tests.fuzz.programs import Recipe
from tests.fuzz.reference import Knob
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Any, Any], Any]


def _double_error(output: Tensor, target: Tensor) -> Tensor:
    return 2 * (output - target).square().mean()


def _objective(model: nn.Module, batch: Any, loss: Loss) -> Any:
    return loss(model(batch[0]), batch[1])


def _with_metrics(model: nn.Module, batch: Any, loss: Loss) -> Any:
    output = model(batch[0])
    return loss(output, batch[1]), {"largest": output.abs().max()}


def _decay(model: nn.Module, batch: Any, loss: Loss) -> Any:
    squares = sum((p.abs() ** 2).sum() for p in model.parameters() if isinstance(p, nn.Parameter))
    return _objective(model, batch, loss) + 0.01 * squares


def _trained_decay(model: nn.Module, batch: Any, loss: Loss) -> Any:
    squares = sum((p.abs() ** 2).sum() for p in model.parameters() if p.requires_grad)
    return _objective(model, batch, loss) + 0.01 * squares


def _vector(model: nn.Module, batch: Any, loss: Loss) -> Any:
    real = [p for p in model.parameters() if not p.is_complex()]
    return _objective(model, batch, loss) + 0.01 * nn.utils.parameters_to_vector(real).square().sum()


def _penalty(model: nn.Module, batch: Any, loss: Loss) -> Any:
    x, y = batch
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return loss(output, y) + 0.1 * slope.square().mean()


OBJECTIVES: dict[str, Callable[..., Any]] = {
    "objective": _objective,
    "with metrics": _with_metrics,
    "decay": _decay,
    "trained decay": _trained_decay,
    "vector": _vector,
    "penalty": _penalty,
}
NAMES = {
    "numbers": {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss, "smooth_l1": F.smooth_l1_loss},
    "classes": {"cross_entropy": F.cross_entropy},
}
METRICS = {"numbers": ("mse", "mae"), "classes": ("accuracy",)}
LOSSES = {
    "numbers": (*NAMES["numbers"], "function", "module", "sum", "knob", *OBJECTIVES),
    "classes": ("cross_entropy", "weighted", "smooth", "function", "knob", *OBJECTIVES),
}


def loss_of(recipe: Recipe, task: str, dtype: str, knob: Knob) -> dict[str, Any]:
    """The keywords for `compile`: a loss, as a name or a function, or an objective."""
    base = F.mse_loss if task == "numbers" else F.cross_entropy
    if recipe.loss in NAMES[task]:
        return {"loss": recipe.loss}
    if recipe.loss in OBJECTIVES:
        return {"objective": functools.partial(OBJECTIVES[recipe.loss], loss=base)}
    if recipe.loss == "knob":
        return {"objective": lambda model, batch: base(model(batch[0]), batch[1]) * knob.value}
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=getattr(torch, dtype))
    return {
        "loss": {
            "function": _double_error if task == "numbers" else (lambda o, t: F.nll_loss(o.log_softmax(1), t)),
            "module": nn.SmoothL1Loss(beta=0.5),
            "sum": nn.MSELoss(reduction="sum"),
            "weighted": nn.CrossEntropyLoss(weight=weight),
            "smooth": nn.CrossEntropyLoss(label_smoothing=0.1),
        }[recipe.loss]
    }


def plain_loss(given: dict[str, Any], task: str) -> Callable[[nn.Module, Any], tuple[Tensor, dict[str, Any]]]:
    """The same as a function of a model and a batch, that gives a loss and metrics."""

    def run(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        if "objective" in given:
            result = given["objective"](model, batch)
            return result if isinstance(result, tuple) else (result, {})
        loss = given["loss"]
        function = NAMES[task][loss] if isinstance(loss, str) else loss
        output = model(batch[0])
        return function(output, batch[1]), {"": output.detach()}

    return run


CLASSES: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
}
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "sgd": {"momentum": [0.9, (0.0, 0.8)], "weight_decay": [0.01, (0.0, 0.1)], "dampening": [0.3]},
    "adam": {"betas": [(0.8, 0.99)], "weight_decay": [0.01, (0.0, 0.1)], "amsgrad": [True], "eps": [1e-6]},
    "adamw": {"weight_decay": [0.0, (0.0, 0.1)], "amsgrad": [True], "maximize": [True]},
    "rmsprop": {"alpha": [0.9], "momentum": [0.5], "centered": [True], "weight_decay": [0.01]},
    "adagrad": {"lr_decay": [0.1], "initial_accumulator_value": [0.1], "weight_decay": [0.01]},
    "adadelta": {"rho": [0.8], "weight_decay": [0.01]},
    "nadam": {"momentum_decay": [0.01], "weight_decay": [0.01], "decoupled_weight_decay": [True]},
    "radam": {"weight_decay": [0.01], "decoupled_weight_decay": [True]},
    "adamax": {"weight_decay": [0.01]},
}
PAIRS = {"betas"}  # whose value is a tuple for one member


def optimizer_of(recipe: Recipe) -> Any:
    """What a user gives as the optimizer: a name, a class, or a class with an argument bound."""
    kind = CLASSES[recipe.optimizer]
    return {"name": recipe.optimizer, "class": kind, "partial": functools.partial(kind)}[recipe.form]


SCHEDULES: dict[str, Any] = {
    "exponential": functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    "warm": functools.partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.3, total_iters=2),
}


@st.composite
def recipes(draw: Callable[..., Any], task: str, dtype: str) -> Recipe:
    """Any recipe for a task."""
    optimizer = draw(st.sampled_from(sorted(CLASSES)))
    rate = draw(st.sampled_from([0.02, 0.05, (0.01, 0.05), (0.02, 0.0, 0.05)]))
    options = OPTIONS[optimizer]
    chosen = draw(st.lists(st.sampled_from(sorted(options)), max_size=2, unique=True))
    hyper = (("lr", rate), *((name, draw(st.sampled_from(options[name]))) for name in chosen))
    loss = draw(st.sampled_from(LOSSES[task]))
    metrics = METRICS[task] if loss not in (*OBJECTIVES, "knob") and draw(st.booleans()) else ()
    clip = draw(st.sampled_from([None, None, None, 0.3, (0.1, 1.0)]))
    schedule = draw(st.sampled_from([None, None, None, None, "cosine", "linear", *SCHEDULES]))
    low = dtype == "float32" and draw(st.sampled_from([False, False, False, True]))
    if low and optimizer != "sgd":  # which divide a gradient that is 0 but for bf16's rounding by its own size
        hyper = (*((name, value) for name, value in hyper if name != "eps"), ("eps", 1e-2))
    form = draw(st.sampled_from(["name", "name", "class", "partial"]))
    return Recipe(optimizer, hyper, loss, metrics, clip, schedule, "bf16" if low else "float32", form)

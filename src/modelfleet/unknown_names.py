"""Unknown names and arguments: the error suggests our word for another library's, or the nearest name."""

import functools
import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

from modelfleet.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")

_DATA = "the first argument: data=(x, y)"
_DEVICES = "devices of the fleet: mf.Fleet(models, devices=...)"
_LOADER = "a loader that has workers of its own, such as a torch DataLoader"
_SILENCE = "nothing: it shows no progress"
_NO_CALLBACKS = "nothing: only fit calls callbacks"
_ANY_VERB = {
    "accelerator": _DEVICES,
    "batchsize": "batch_size",
    "device": _DEVICES,
    "devices": _DEVICES,
    "generator": _DATA,
    "max_queue_size": _LOADER,
    "n_jobs": _DEVICES,
    "use_multiprocessing": _LOADER,
    "workers": _LOADER,
    "x": _DATA,
    "y": _DATA,
}
_BY_VERB = {
    "fit": {
        "accumulate_grad_batches": "a larger batch_size",
        "ckpt_path": "callbacks=[mf.Checkpoint(folder)]",
        "clip_norm": "clip_norm of fleet.compile",
        "datamodule": _DATA,
        "early_stopping": "callbacks=[mf.EarlyStopping(...)]",
        "enable_progress_bar": "progress: True or False",
        "eval_set": "validation",
        "gradient_clip_val": "clip_norm of fleet.compile",
        "learning_rate": "lr of fleet.compile",
        "limit_train_batches": "steps_per_epoch",
        "logger": "callbacks=[...] with a modelfleet.Callback that logs",
        "loss": "loss of fleet.compile",
        "lr": "lr of fleet.compile",
        "max_epochs": "epochs",
        "max_steps": "epochs and steps_per_epoch",
        "metrics": "metrics of fleet.compile",
        "n_epochs": "epochs",
        "num_epochs": "epochs",
        "optimizer": "optimizer of fleet.compile",
        "precision": "precision of fleet.compile",
        "sample_weights": "sample_weight",
        "seed": "seed of the fleet: mf.Fleet(models, seed=...)",
        "start_epoch": "initial_epoch",
        "train_data": _DATA,
        "train_dataloaders": _DATA,
        "val_data": "validation",
        "val_dataloaders": "validation",
        "validation_batch_size": "batch_size, which holds for the validation data, too",
        "validation_data": "validation",
        "validation_freq": "validation, which is evaluated after every epoch",
        "validation_steps": "validation with fewer rows",
        "verbose": "progress: True or False",
    },
    "evaluate": {
        "callbacks": _NO_CALLBACKS,
        "metrics": "metrics of fleet.compile",
        "return_dict": "nothing: it returns a dict for every member",
        "sample_weight": "data with the weights: fleet.evaluate((x, y, w))",
        "steps": "data with fewer rows",
        "verbose": _SILENCE,
    },
    "predict": {"callbacks": _NO_CALLBACKS, "steps": "data with fewer rows", "verbose": _SILENCE},
}
# Other libraries' names of losses, metrics, hyperparameters and precisions, without underscores, and ours.
_FOREIGN_NAMES = {
    # losses
    "binarycrossentropy": "bce",
    "categoricalcrossentropy": "cross_entropy",
    "crossentropy": "cross_entropy",
    "crossentropyloss": "cross_entropy",
    "kldivergence": "kl_div",
    "kullbackleiblerdivergence": "kl_div",
    "l2": "mse",
    "logloss": "cross_entropy",
    "meanabsoluteerror": "mae",
    "meansquarederror": "mse",
    "mseloss": "mse",
    "poisson": "poisson_nll",
    "sparsecategoricalcrossentropy": "cross_entropy",
    # metrics
    "acc": "accuracy",
    "binaryaccuracy": "accuracy",
    "categoricalaccuracy": "accuracy",
    "r2score": "r2",
    "sparsecategoricalaccuracy": "accuracy",
    "sparsetopkcategoricalaccuracy": "top_5",
    "topkcategoricalaccuracy": "top_5",
    # hyperparameters, and arguments of `compile` that are taken for one
    "clipnorm": "clip_norm",
    "criterion": "loss",
    "decay": "weight_decay",
    "dtype": "precision",
    "epsilon": "eps",
    "globalclipnorm": "clip_norm",
    "gradientclipval": "clip_norm",
    "learningrate": "lr",
    "lossfn": "loss",
    "lrscheduler": "schedule",
    "maxgradnorm": "clip_norm",
    "scheduler": "schedule",
    "wd": "weight_decay",
    "weightedmetrics": "metrics",
    # precisions
    "bf16-mixed": "bf16",
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp32": "float32",
    "half": "fp16",
    "mixedbfloat16": "bf16",
    "mixedfloat16": "fp16",
}


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelt one resembles most, or None if it resembles none."""
    return next(iter(get_close_matches(str(name), list(known), n=1, cutoff=0.5)), None)


def unknown(kind: str, name: object, known: Iterable[str]) -> InputError:
    """Return the error for an unknown name, which suggests our word for another library's, or the nearest name."""
    names = sorted(known)
    near = _FOREIGN_NAMES.get(str(name).lower().replace("_", ""))
    if near not in names and not (near is not None and kind.startswith("hyperparameter")):
        near = nearest(name, names)
    hint = f"Did you mean {near!r}? " if near else ""
    return InputError(f"unknown {kind} {name!r}. {hint}Known: {', '.join(names)}.")


def foreign_argument(verb: str, name: str) -> str | None:
    """Explain another library's argument in modelfleet's words; return None if the argument is not known.

    foreign_argument("fit", "validation_data")   # "fleet.fit has no argument 'validation_data'. Use validation."
    """
    instead = _BY_VERB.get(verb, {}).get(name) or _ANY_VERB.get(name)
    return None if instead is None else f"fleet.{verb} has no argument {name!r}. Use {instead}."


def explain_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """Have a verb of the fleet explain wrong arguments. A decorator for methods without `**`.

    `fit(x, y)` and other libraries' arguments raise `InputError` with what to write instead. A misspelt argument
    gets the nearest one that exists.
    """
    verb = method.__name__
    parameters = inspect.signature(method).parameters
    names = list(parameters)
    positional = sum(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())

    @functools.wraps(method)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                explanation = foreign_argument(verb, name)
                if explanation is not None:
                    raise InputError(explanation)
                raise unknown(f"argument of fleet.{verb}", name, names[1:])
        if len(args) > positional:
            expected = ", ".join(names[1:positional])
            raise InputError(
                f"fleet.{verb} got {len(args) - 1} arguments by position, expected {expected}. "
                f"Give inputs and targets together, fleet.{verb}((x, y)), and everything else by name."
            )
        return method(*args, **kwargs)

    return explained

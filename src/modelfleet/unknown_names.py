"""Arguments of other libraries' `fit`, `evaluate` and `predict`, and what modelfleet has for them.

`errors.unknown` knows other libraries' names of losses, metrics and hyperparameters.
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from modelfleet.errors import InputError, unknown

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

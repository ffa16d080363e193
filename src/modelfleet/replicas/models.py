"""What people give to be asked: a model, a function of rows, or a factory that makes either in every worker."""

import contextvars
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelfleet import frameworks
from modelfleet.devices import Device, parse_devices
from modelfleet.errors import FleetError, InputError, StrategyError
from modelfleet.frameworks import randomness
from modelfleet.frameworks.batches import inputs
from modelfleet.planning import memory
from modelfleet.words import size
from modelfleet.workers import CannotSendError, Place, SharedValue
from modelfleet.workers.inline import InlinePlace

PRECISIONS = ("float32", "bf16", "fp16")


@dataclass(frozen=True)
class Source:
    """Where replicas have their model from."""

    value: Any
    """The model; or the factory, if it is not known yet what that makes."""
    framework: Any
    """The model's adapter; or `Unmade`."""

    @classmethod
    def of(cls, given: Any) -> "Source":
        """What was given. A function that needs no arguments is a factory; one that needs one is a model."""
        found = _adapter(given)
        if found is not None:
            return cls(given, found)
        if callable(given) and frameworks.adapter("python").needed(given) == 0:
            return cls(given, Unmade())
        raise InputError(
            f"{_described(given)} is not a model that can be asked. Give a torch.nn.Module, a keras.Model, a "
            f"flax.nnx.Module, a (params, apply) pair of JAX, a tf.Module; anything with a `predict`; a function "
            f"of one argument, the rows; or a function without arguments that returns one of these."
        )

    @property
    def unmade(self) -> bool:
        """Whether it is a factory."""
        return isinstance(self.framework, Unmade)

    def made(self) -> "Source":
        """The model, if this is a factory. Generators are seeded for it: all workers get the same weights."""
        if not self.unmade:
            return self
        with randomness.kept(), ExitStack() as seeded:
            random.seed(0)
            np.random.seed(0)
            for framework in frameworks.loaded():
                seeded.enter_context(framework.seeding(0))
            model = self.value()
        found = _adapter(model)
        if found is None:
            raise InputError(
                f"{_described(self.value)} returned {_described(model)}, which is not a model that can be asked. "
                f"A function without arguments has to make a model; one that answers rows itself needs one "
                f"argument, the rows."
            )
        return Source(model, found)

    def at(self, places: Sequence[Place], seconds: float) -> "Source":
        """The source for places: in this process the model itself, made here; for workers what was given.

        seconds: how long a factory may take here.
        """
        here = all(isinstance(place, InlinePlace) for place in places)
        return self._made_within(seconds) if self.unmade and here else self

    def _made_within(self, seconds: float) -> "Source":
        """As `made`; in a thread, as nothing else can be waited for no longer than so long."""
        making: Future[Source] = Future()
        before, settings = randomness.state(), frameworks.settings(None)

        def make() -> None:
            try:
                with frameworks.using(settings):
                    made = self.made()
            except BaseException as error:  # the caller's to hear, whatever it is
                making.set_exception(error)
            else:
                making.set_result(made)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(make,), name="modelfleet-factory", daemon=True).start()
        if wait([making], min(seconds, threading.TIMEOUT_MAX)).not_done:
            randomness.restore(before)  # which it had seeded
            raise FleetError(
                f"{_described(self.value)} had not made its model after {seconds:g} s, and is left behind in a "
                f"thread, which nobody can end. Give a larger start_timeout if it takes that long."
            )
        return making.result()

    def check(self, precision: str, places: Sequence[Place]) -> None:
        """Refuse a precision that the model can't have, and devices whose memory is too small for its weights."""
        if self.unmade:
            return  # its worker will look
        self.check_precision(precision)
        for place in places:
            _check_memory(self.framework, self.value, place)

    def check_precision(self, precision: str) -> None:
        """Refuse a precision that the framework does not know."""
        if precision not in self.framework.PRECISIONS:
            raise InputError(
                f'precision="{precision}" is for models of torch and JAX; this one is of {self.framework.NAME}. '
                f"Set the precision in the model itself."
            )

    def share(self, place: Place) -> SharedValue:
        """The source for all workers of places like this one."""
        frozen = getattr(self.framework, "frozen", lambda model: model)
        try:
            return place.share(frozen(self.value), "the factory" if self.unmade else "the model")
        except CannotSendError as error:
            raise StrategyError(
                f"{error} Or give a function without arguments that makes the model: it is called in every "
                f"worker. Or use one device, for which nothing is sent."
            ) from error


class Unmade:
    """Stands for the framework of a model that is to be made by workers, where only devices and data are known."""

    NAME = None

    def __init__(self) -> None:
        self.arrays = frameworks.adapter("python").arrays
        self.inputs = inputs

    @staticmethod
    def choose(wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
        """The devices that the imported frameworks see: of the first that has accelerators; or else the CPU."""
        loaded = frameworks.loaded()
        for framework in sorted(loaded, key=lambda one: not one.accelerators()):
            return framework.choose(wanted)
        return (Device("cpu"),) if wanted is None else wanted


def _adapter(given: Any) -> Any:
    """The adapter of what can be asked as it is; None for a factory, and for all else."""
    try:
        return frameworks.adapter_of(given, "model")
    except InputError:
        plain = frameworks.adapter("python")
        return plain if plain.is_model(given) else None


def _check_memory(framework: Any, model: Any, place: Place) -> None:
    """Refuse a model whose weights alone are more than a device of this machine has free."""
    if place.name.startswith("ray"):
        return  # only its worker can know
    (device,) = parse_devices(place.device) or ()
    there = memory.available(framework, framework.native(device), place.device)
    need = framework.weight_bytes(model)
    if there is not None and need > there:
        raise InputError(
            f"device '{place.name}' has no memory for even one replica: the weights take {size(need)}, and "
            f"{size(there)} are free. Free some, use a larger device, or a smaller model or precision."
        )


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    name = getattr(value, "__qualname__", None)
    return f"the function {name}" if name is not None else f"a {type(value).__module__}.{type(value).__qualname__}"

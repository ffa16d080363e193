"""Models of replicas: a model, a function of rows, or a factory that makes either in every worker."""

import contextvars
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelfleet import frameworks, free_memory
from modelfleet.devices import Device, parse_devices
from modelfleet.errors import FleetError, InputError, StrategyError
from modelfleet.formatting import size
from modelfleet.frameworks import global_generators
from modelfleet.frameworks.adapter_protocol import Adapter
from modelfleet.frameworks.batch_parts import inputs
from modelfleet.frameworks.contexts import current_settings, using_settings
from modelfleet.types import Model, Precision
from modelfleet.workers import CannotSendError, Place, SharedValue
from modelfleet.workers.inline import InlinePlace


@dataclass(frozen=True)
class Source:
    """Source of the replicas' model: the model itself, or a factory."""

    value: Model
    """Model; or a factory that has not been called yet."""
    framework: Any
    """Adapter of the model's framework; `UnknownFramework` for a factory."""

    @classmethod
    def of(cls, given: Model) -> "Source":
        """Return the source for what a user gave. A function that needs no arguments is a factory.

        Raises:
            InputError: If it is neither a model nor a function.
        """
        found = _adapter(given)
        if found is not None:
            return cls(given, found)
        if callable(given) and frameworks.adapter("python").needed(given) == 0:
            return cls(given, UnknownFramework())
        raise InputError(
            f"{_described(given)} is not a model that can answer rows. Give a torch.nn.Module, a keras.Model, a "
            f"flax.nnx.Module, a (params, apply) pair of JAX, a tf.Module; anything with a `predict`; a function "
            f"of one argument, the rows; or a function without arguments that returns one of these."
        )

    @property
    def is_factory(self) -> bool:
        """True if the model has to be made."""
        return isinstance(self.framework, UnknownFramework)

    def made(self) -> "Source":
        """Return the source of the model itself; a factory is called for that.

        Random generators are seeded for the call, so that all workers get the same weights.
        """
        if not self.is_factory:
            return self
        with global_generators.kept(), ExitStack() as seeded:
            random.seed(0)
            np.random.seed(0)
            for framework in frameworks.imported_adapters():
                seeded.enter_context(framework.seeding(0))
            model = self.value()
        found = _adapter(model)
        if found is None:
            raise InputError(
                f"{_described(self.value)} returned {_described(model)}, which can't answer rows. A function "
                f"without arguments has to make a model; one that answers rows itself takes them as its only "
                f"argument."
            )
        return Source(model, found)

    def at(self, places: Sequence[Place], seconds: float) -> "Source":
        """Return the source for places. In this process, a factory is called here and may take `seconds`."""
        here = all(isinstance(place, InlinePlace) for place in places)
        return self._made_within(seconds) if self.is_factory and here else self

    def _made_within(self, seconds: float) -> "Source":
        """Return `made()`, called in a thread, because only a thread can be waited for with a time limit."""
        making: Future[Source] = Future()
        before, settings = global_generators.state(), current_settings(None)

        def make() -> None:
            try:
                with using_settings(settings):
                    made = self.made()
            except BaseException as error:  # raised in the caller, whatever it is
                making.set_exception(error)
            else:
                making.set_result(made)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(make,), name="modelfleet-factory", daemon=True).start()
        if wait([making], min(seconds, threading.TIMEOUT_MAX)).not_done:
            global_generators.restore(before)  # the factory's thread had seeded it
            raise FleetError(
                f"{_described(self.value)} had not made its model after {seconds:g} s, and is left behind in a "
                f"thread, which can't be ended. Give a larger start_timeout if it takes that long."
            )
        return making.result()

    def check(self, precision: Precision, places: Sequence[Place]) -> None:
        """Raise InputError if the model can't have a precision, or a device has no memory for its weights."""
        if self.is_factory:
            return  # the worker will check
        self.check_precision(precision)
        for place in places:
            _check_memory(self.framework, self.value, place)

    def check_precision(self, precision: Precision) -> None:
        """Raise InputError if the framework does not offer a precision."""
        if precision not in self.framework.PRECISIONS:
            raise InputError(
                f'precision="{precision}" is for models of torch and JAX; this one is of {self.framework.NAME}. '
                f"Set the precision in the model itself."
            )

    def publish(self, place: Place) -> SharedValue:
        """Send the model, or the factory, to all workers of places like this one."""
        frozen = getattr(self.framework, "frozen", lambda model: model)
        try:
            return place.publish(frozen(self.value), "the factory" if self.is_factory else "the model")
        except CannotSendError as error:
            raise StrategyError(
                f"{error} Or give a function without arguments that makes the model, which is called in every "
                f"worker. Or use one device, for which nothing is sent."
            ) from error


class UnknownFramework:
    """Stands in for the framework of a model that workers will make: only devices and data are known."""

    NAME = None

    def __init__(self) -> None:
        self.arrays = frameworks.adapter("python").arrays
        self.inputs = inputs

    @staticmethod
    def choose(wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
        """Return the devices of the first imported framework that has accelerators; without one, the CPU."""
        loaded = frameworks.imported_adapters()
        for framework in sorted(loaded, key=lambda one: not one.accelerators()):
            return framework.choose(wanted)
        return (Device("cpu"),) if wanted is None else wanted


def _adapter(given: Model) -> Adapter | None:
    """Return the adapter of a model or a function of rows; None for anything else."""
    try:
        return frameworks.adapter_of(given, "model")
    except InputError:
        plain = frameworks.adapter("python")
        return plain if plain.is_model(given) else None


def _check_memory(framework: Adapter, model: Model, place: Place) -> None:
    """Raise InputError if a model's weights alone are larger than the free memory of a device of this machine."""
    if place.on_cluster:
        return  # only the worker can know
    (device,) = parse_devices(place.device) or ()
    available = free_memory.available(framework, framework.native(device), place.device)
    need = framework.weight_bytes(model)
    if available is not None and need > available:
        raise InputError(
            f"device '{place.name}' has no memory for even one replica: the weights take {size(need)}, and "
            f"{size(available)} are free. Free some, use a larger device, or a smaller model or precision."
        )


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    name = getattr(value, "__qualname__", None)
    return f"the function {name}" if name is not None else f"a {type(value).__module__}.{type(value).__qualname__}"

"""Base class of what members exchange during a fit."""

from typing import cast

from modelfleet.argument_checks import check_whole
from modelfleet.callbacks import Callback, Run
from modelfleet.errors import InputError
from modelfleet.exchange.run import ExchangeRun, RunWithMembers


class Exchange(Callback):
    """Base class for what members exchange during a fit. Override `exchange`.

        class Mean(mf.Exchange):
            def exchange(self, run):
                for name, own in run.weights(run.active).items():
                    run.write(run.active, {name: own.mean(0, keepdims=True).repeat(len(own), 0)})

        fleet.fit(data, epochs=10, exchange=Mean(every=1))

    No member takes a step meanwhile. An exchange at an epoch's end comes after the epoch's validation, and before
    the other callbacks. If yours keeps state, override `state` and `restore_state`, and `arrays` and
    `restore_arrays`, as for any callback: a resumed run then equals the unbroken one.

    Args:
        every: Exchange after this many epochs. By default, after every one.
        every_steps: Exchange after this many steps instead. Steps are those of the members with the most steps.

    Raises:
        InputError: Both are given, or one is below 1.
    """

    together = True

    def __init__(self, every: int | None = None, *, every_steps: int | None = None) -> None:
        kind = type(self).__name__
        if every is not None and every_steps is not None:
            raise InputError(f"{kind} got both every and every_steps. Give epochs (every) or steps (every_steps).")
        for argument, value in (("every", every), ("every_steps", every_steps)):
            if value is not None:
                check_whole(f"{kind}: {argument}", value)
        self.every_steps = every_steps
        self.every = None if every_steps is not None else every or 1
        self._done = 0  # exchanges that were due so far, by steps

    def start(self, run: ExchangeRun, *, resumed: bool) -> None:
        """Called before the first step. Check here whether the members can exchange what you need.

        Args:
            run: The members.
            resumed: True if the run continues from a checkpoint.
        """

    def exchange(self, run: ExchangeRun) -> None:
        """Exchange something between the members that train. Called when all of them have taken their steps."""
        raise NotImplementedError(f"{type(self).__name__} has no method exchange(run).")

    @property
    def wants_steps(self) -> bool:
        """True if members exchange after steps."""
        return self.every_steps is not None

    def on_fit_start(self, run: Run) -> None:
        """Call `start`."""
        resumed = run.step > 0 or run.epoch > run.history.initial_epoch
        self._done = 0 if self.every_steps is None else run.step // self.every_steps
        self.start(self._view(run, 0), resumed=resumed)

    def on_step_end(self, run: Run) -> None:
        """Exchange if the number of steps says so."""
        due = 0 if self.every_steps is None else run.step // self.every_steps
        if due > self._done:  # the step itself may have been missed, because a lane failed in it
            self._done = due
            self.exchange(self._view(run, due - 1))

    def on_epoch_end(self, run: Run) -> None:
        """Exchange if the number of epochs says so."""
        if self.every is not None and run.epoch % self.every == 0:
            self.exchange(self._view(run, run.epoch // self.every - 1))

    def _view(self, run: Run, number: int) -> ExchangeRun:
        return ExchangeRun(cast(RunWithMembers, run), type(self).__name__, number)

"""Run a program on a fleet and by its reference, and compare what each has given."""

import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
from tests.fuzz.programs import (
    Add,
    Clone,
    Compile,
    Drop,
    Edit,
    Evaluate,
    Fit,
    Freeze,
    Plan,
    Predict,
    Program,
    Reload,
    Stop,
    Train,
    Turn,
    Verb,
    script,
    short,
)

import modelfleet as mf

TRAINED_TWICE = "a trained parameter that members share"
REFUSED = {
    "an explicit strategy": re.compile(r'strategy="'),  # that these members can't have
    "nothing to train": re.compile(r"has no (parameter|trainable variable|weights that are trained)"),
    "a setting of the optimizer": re.compile(r"Nesterov needs"),
    "complex numbers in files": re.compile(r"safetensors does not support torch.complex128"),
    "a schedule of unknown length": re.compile(r"the schedule '\w+' depends on the number of steps"),
    "no value for a member that has joined since": re.compile(r"each\(\.\.\.\) has no value for"),
    TRAINED_TWICE: re.compile(r"share the trained parameter"),
}
"""What a fleet may refuse though it would work alone: each is documented."""
TOO_LARGE = 1e4
"""Training that has come apart: rounding decides."""


class DifferenceError(AssertionError):
    """A fleet has given something else than the reference."""


class _BrokenOffError(Exception):
    """A run that is broken off by its user."""


def target(program: Program) -> tuple[Any, Any]:
    """The module of a target, and a new reference."""
    name = program.target.partition("-")[0]
    module = import_module(f"tests.fuzz.fleet_{name}")
    return module, module.REFERENCE(program)


def check(program: Program) -> str:
    """Run a program both ways. Gives how it ended: "same", "refused (…)", "both raised" or "came apart"."""
    try:
        return _Check(program).run()
    except DifferenceError as difference:
        raise DifferenceError(f"{difference}\n\n{script(program)}") from difference


class _Check:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.side, self.reference = target(program)
        self.fleet: Any = None
        self.tolerance = self.side.tolerance(program)
        self.count = 0
        self.seen: list[Any] = []  # what verbs in callbacks have given

    # --- the whole --------------------------------------------------------------------------------------------

    def run(self) -> str:
        program = self.program
        nets = {}
        for net in program.nets:
            name = self._new_name()
            self._enlist(name, net)
            nets[name] = net
        trunk: dict[str, Any] = {}
        self.nets, self.trunk = dict(nets), trunk
        self.fleet = self._begun()
        for number, verb in enumerate(program.verbs):
            self.fresh = number == 1 and isinstance(program.verbs[0], Compile)
            ended = self._do(verb, f"verb {number}, {short(verb)}", verb.look or verb is program.verbs[-1])
            if ended:
                return ended
        return "same"

    def _begun(self) -> Any:
        """The fleet that the program begins with."""
        names = [f"m{number}" for number in range(len(self.program.nets))]
        if self.program.build:
            return mf.Fleet.build(self._factory, names, devices=self.program.devices, name=mf.each(names))
        return mf.Fleet({name: self._factory(name) for name in names}, devices=self.program.devices)

    def _factory(self, name: str) -> Any:
        return self.side.make(self.nets[name], self.program.dtype, self.trunk)

    def _new_name(self) -> str:
        self.count += 1
        return f"m{self.count - 1}"

    def _enlist(self, name: str, net: Any) -> None:
        self.reference.names.append(name)
        self.reference.numbers[name] = int(name[1:])
        self.reference.kinds[name] = net.kind
        self.reference.enlist(name, net)

    def _do(self, verb: Verb, where: str, look: bool) -> str | None:
        """Do it both ways, and compare. Gives how the program ends, if it does."""
        self.seen = []
        alone, alone_error = _attempt(lambda: self._by_reference(verb))
        seen_alone, self.seen = self.seen, []
        found, error = _attempt(lambda: self._by_fleet(verb))
        seen = self.seen
        if alone_error is not None:
            if error is None and not getattr(found, "failed", None):
                raise DifferenceError(f"{where}: alone it raises {_told(alone_error)}; the fleet does not")
            return "both raised"
        if _apart(alone) or _apart(seen_alone):
            return "came apart"
        if isinstance(error, mf.FleetError):
            refused = [what for what, words in REFUSED.items() if words.search(str(error))]
            if refused and not (refused[0] == TRAINED_TWICE and isinstance(verb, Evaluate | Predict)):
                return f"refused ({refused[0]})"
        if error is not None:
            raise DifferenceError(f"{where}: works alone; the fleet raises {_told(error)}") from error
        if getattr(found, "failed", None):
            raise DifferenceError(f"{where}: works alone; the fleet sets aside {found.failed}")
        if isinstance(verb, Fit):
            found = {name: dict(found[name]) for name in self.reference.names}
        self._compare(found, alone, where)
        self._compare(seen, seen_alone, f"{where}, in a callback")
        if look:
            for name in self.reference.names:
                own = self.reference.observe(name)
                if _apart(own):
                    return "came apart"
                self._compare(self.side.observe(self.fleet[name]), own, f"{where}, then the model of {name}")
        return None

    def _compare(self, found: Any, expected: Any, where: str) -> None:
        difference = unlike(found, expected, self.tolerance)
        if difference:
            raise DifferenceError(f"{where}: {difference}")

    # --- alone ------------------------------------------------------------------------------------------------

    def _who(self, number: int) -> str:
        return self.reference.names[number % len(self.reference.names)]

    def _by_reference(self, verb: Verb, stopped: set[str] | None = None) -> Any:
        reference = self.reference
        match verb:
            case Fit():

                def callback(epoch: int) -> set[str]:
                    stopped: set[str] = set()
                    for at, inner in verb.during:
                        if at == epoch:
                            self.seen.append(self._by_reference(inner, stopped))
                    return stopped

                return reference.fit(verb, callback)
            case Evaluate():
                return reference.evaluate(verb)
            case Predict():
                return reference.predict(verb)
            case Compile():
                names = reference.names if verb.members is None else [self._who(n) for n in verb.members]
                return reference.compile(verb, list(dict.fromkeys(names)))
            case Reload():
                reference.reload()
                return reference.compile(verb, list(reference.names))
            case Stop():
                assert stopped is not None
                stopped.add(self._who(verb.member))
            case Turn():
                reference.knob.value = verb.value
            case Freeze():
                return reference.freeze(verb, self._who(verb.member))
            case Edit():
                return reference.edit(verb, self._who(verb.member), self._who(verb.member + 1))
            case Train():
                name = self._who(verb.member)
                return reference.train(verb, name, reference.batches(verb.data, 4, name))
        return None  # who is in it is changed when the fleet is

    # --- in a fleet --------------------------------------------------------------------------------------------

    def _by_fleet(self, verb: Verb, run: Any = None) -> Any:
        fleet = self.fleet if run is None else run.fleet
        match verb:
            case Fit():
                return self._fit(verb)
            case Evaluate():
                return fleet.evaluate(self._data(verb.data, verb.batch), **self._size(verb.data, verb.batch))
            case Predict():
                return fleet.predict(self._data(verb.data, verb.batch), **self._size(verb.data, verb.batch))
            case Plan():
                str(fleet.plan() if verb.data is None else fleet.plan(self._data(verb.data, 4)))
            case Compile():
                names = None if verb.members is None else [self._who(n) for n in verb.members]
                names = names and list(dict.fromkeys(names))
                self.side.compile(fleet, verb.recipe, names or fleet.names, self, all_=names is None)
            case Add():
                name = self._new_name()
                self.nets[name] = verb.net
                self._enlist(name, verb.net)
                self.reference.compile(verb, [name])
                fleet.add(name, self._factory(name))
                self.side.compile(fleet, verb.recipe, [name], self, all_=False)
            case Drop():
                if len(self.reference.names) > 1:
                    name = self._who(verb.member)
                    fleet.drop(name)
                    self.reference.names.remove(name)
                    self.reference.forget(name)
            case Clone():
                name, new = self._who(verb.member), self._new_name()
                fleet.clone(name, as_=new)
                if hasattr(fleet[name], "fuzzed"):  # a note of ours, which no copy takes along
                    fleet[new].fuzzed = fleet[name].fuzzed
                self.nets[new] = self.nets[name]
                self.reference.names.append(new)
                self.reference.numbers[new] = int(new[1:])
                self.reference.kinds[new] = self.reference.kinds[name]
                self.reference.clone(name, new)
            case Reload():
                with tempfile.TemporaryDirectory() as folder:
                    fleet.save(folder, optimizer=False)  # the recipe that follows may have another optimizer
                    names = iter(fleet.names)
                    self.fleet = mf.load(
                        folder, lambda name=None: self._factory(next(names)), devices=self.program.devices
                    )
                self.side.compile(self.fleet, verb.recipe, self.fleet.names, self, all_=True)
            case Stop():
                run.stop(self._who(verb.member))
            case Turn():
                self.side.turn(self, verb.value)
            case Freeze():
                self.side.freeze(fleet[self._who(verb.member)], verb)
            case Edit():
                name, other = self._who(verb.member), self._who(verb.member + 1)
                if run is None:
                    self.side.edit(fleet[name], fleet[other], verb)
                else:
                    self.side.edit(run.sync(name), run.sync(other), verb)
                    run.take(name)
            case Train():
                name = self._who(verb.member)
                batches = self.reference.batches(verb.data, 4, name)
                self.side.train(fleet[name], batches, self.program.task)
        return None

    def _fit(self, verb: Fit) -> Any:
        owner = self

        class During(mf.Callback):
            """The verbs of a program's callbacks."""

            def on_epoch_end(self, run: Any) -> None:
                self._run(run, run.epoch)

            def on_fit_end(self, run: Any) -> None:
                self._run(run, 0)

            def _run(self, run: Any, epoch: int) -> None:
                for at, inner in verb.during:
                    if at == epoch:
                        owner.seen.append(owner._by_fleet(inner, run))

        class Break(mf.Callback):
            """Breaks a run off, once."""

            done = False

            def on_epoch_end(self, run: Any) -> None:
                if run.epoch == verb.broken and not self.done:
                    self.done = True
                    raise _BrokenOffError

        def epochs(value: Any) -> Any:
            if not isinstance(value, tuple):
                return value
            names = self.fleet.names
            return mf.each({name: value[number % len(value)] for number, name in enumerate(names)})

        options: dict[str, Any] = {
            "epochs": epochs(verb.epochs),
            "shuffle": verb.shuffle,
            "strategy": verb.strategy,
            "progress": False,
            "steps_per_epoch": verb.limit,
            **self._size(verb.data, verb.batch),
        }
        if verb.validation is not None:
            options["validation"] = self._data(verb.validation, verb.batch)
        longest = max(verb.epochs) if isinstance(verb.epochs, tuple) else verb.epochs
        if verb.broken is None or not 2 <= verb.broken <= longest or not self.fresh:
            callbacks = [During()] if verb.during else []
            data = self._data(verb.data, verb.batch)
            before = self.side.copied(data)
            history = self.fleet.fit(data, callbacks=callbacks, **options)
            if isinstance(data, tuple) and unlike(data, before, 0.0):
                raise DifferenceError(f"{short(verb)}: the user's data were written to")
            return history
        with tempfile.TemporaryDirectory() as folder:
            callbacks = [mf.Checkpoint(folder), Break()]
            with suppress(_BrokenOffError):
                self.fleet.fit(self._data(verb.data, verb.batch), callbacks=callbacks, **options)
            self.trunk.clear()
            self.fleet = self._begun()  # the same script again
            self._by_fleet(self.program.verbs[0])
            return self.fleet.fit(self._data(verb.data, verb.batch), callbacks=callbacks, **options)

    def _size(self, data: Any, batch: Any) -> dict[str, Any]:
        """Arrays are cut into batches by the fleet."""
        if data.form != "arrays":
            return {}
        if not isinstance(batch, tuple):
            return {"batch_size": batch}
        names = self.fleet.names
        return {"batch_size": mf.each({name: batch[number % len(batch)] for number, name in enumerate(names)})}

    def _data(self, data: Any, batch: Any) -> Any:
        """What the user gives to a verb."""
        reference, first = self.reference, batch[0] if isinstance(batch, tuple) else batch
        if data.own is None:
            return self._one(data, first, None)
        sizes = batch if isinstance(batch, tuple) else (batch,)
        return mf.each(
            {
                name: self._one(data, sizes[position % len(sizes)], reference.numbers[name])
                for position, name in enumerate(self.fleet.names)
            }
        )

    def _one(self, data: Any, batch: int, member: int | None) -> Any:
        if data.form == "arrays":
            return self.side.tensors(self.reference, data, member)
        loader = self.side.loader(self.reference, data, batch, member)
        return (lambda: iter(loader)) if data.form == "function" else loader


def _attempt(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return act(), None
    except DifferenceError:
        raise
    except Exception as error:  # whatever a model or the library raises is what is compared
        return None, error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


def _apart(tree: Any) -> bool:
    """Whether training has come apart."""
    if isinstance(tree, Mapping):
        return any(map(_apart, tree.values()))
    if isinstance(tree, list | tuple):
        return any(map(_apart, tree))
    if tree is None or isinstance(tree, str):
        return False
    array = np.asarray(_host(tree))
    return array.dtype.kind in "fc" and not bool(np.all(np.abs(array) < TOO_LARGE))


def _host(leaf: Any) -> Any:
    if not hasattr(leaf, "detach"):
        return leaf
    leaf = leaf.detach().resolve_conj().cpu()
    return (leaf.float() if str(leaf.dtype) == "torch.bfloat16" else leaf).numpy()


def unlike(found: Any, expected: Any, tolerance: float) -> str:
    """The first difference of two trees, in words; empty if there is none."""
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or set(found) != set(expected):
            keys = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            return f"has {keys}, expected {sorted(map(str, expected))}"
        for key, value in expected.items():
            difference = unlike(found[key], value, tolerance)
            if difference:
                return f"[{key}] {difference}"
        return ""
    if isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return f"is {found!r:.200}, expected {expected!r:.200}"
        pairs = enumerate(zip(found, expected, strict=True))
        differences = ((number, unlike(a, b, tolerance)) for number, (a, b) in pairs)
        return next(
            (f"[{number}]{'' if text.startswith('[') else ' '}{text}" for number, text in differences if text), ""
        )
    if expected is None or isinstance(expected, bool | str | int):
        return "" if found == expected else f"is {found!r:.100}, expected {expected!r}"
    if not hasattr(expected, "shape") and not isinstance(expected, float):
        return ""
    a, b = np.asarray(_host(found)), np.asarray(_host(expected))
    if a.shape != b.shape:
        return f"has shape {a.shape}, expected {b.shape}"
    if a.dtype.kind != b.dtype.kind and hasattr(expected, "dtype"):
        return f"is {found.dtype}, expected {expected.dtype}"
    if not a.size or a.dtype.kind not in "fciub":
        return ""
    scale = max(1.0, float(np.abs(b).max()))
    difference = float(np.abs(a.astype(complex) - b.astype(complex)).max()) / scale
    if not difference <= tolerance + getattr(expected, "doubt", 0.0):
        return f"is off by {difference:.2g} ({a.ravel()[:3]} where alone {b.ravel()[:3]})"
    return ""

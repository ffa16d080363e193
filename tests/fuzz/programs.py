"""Programs: what a user does with a fleet, as frozen values. `script` writes one down so that it can be run again.

A member is named by a number, which counts round the members at that moment. A number that may differ from member
to member is a tuple, which is taken in turns.
"""

from dataclasses import dataclass, fields
from typing import Any

from modelfleet.types import Precision, Strategy

Each = Any
"""One value for all, or a tuple of values that the members take in turns."""


@dataclass(frozen=True)
class Data:
    """What members learn from. `own`: rows of each member's own data; without it, one data set for all.

    form: "arrays", "list" (of batches), "loader" (a DataLoader), "shuffled" (one that shuffles), "function".
    uneven: batches of a loader have unlike numbers of rows.
    """

    rows: int = 12
    seed: int = 0
    form: str = "arrays"
    own: tuple[int, ...] | None = None
    uneven: bool = False


@dataclass(frozen=True)
class Recipe:
    """What `compile` is told. `hyper` are pairs of a name and an `Each`."""

    optimizer: str = "sgd"
    hyper: tuple[tuple[str, Each], ...] = (("lr", 0.05),)
    loss: str = "mse"
    metrics: tuple[str, ...] = ()
    clip: Each = None
    schedule: str | None = None
    precision: Precision = "float32"
    form: str = "name"


@dataclass(frozen=True)
class Verb:
    """Something that is done. `look`: compare the members' models afterwards."""

    look: bool = False


@dataclass(frozen=True)
class Compile(Verb):
    """Compile all members, or those of these numbers."""

    recipe: Recipe = Recipe()
    members: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Fit(Verb):
    """Train. `during`: verbs at the end of an epoch, or of the fit (epoch 0), from a callback.

    broken: the epoch at whose end the run is broken off, to be resumed from the checkpoint of the one before.
    """

    data: Data = Data()
    epochs: Each = 1
    batch: Each = 4
    shuffle: bool = False
    strategy: Strategy = "auto"
    validation: Data | None = None
    during: tuple[tuple[int, Verb], ...] = ()
    broken: int | None = None
    steps: int | None = None

    @property
    def limit(self) -> int | None:
        """Steps of an epoch, for loaders."""
        return None if self.data.form == "arrays" else self.steps

    @property
    def validation_batch(self) -> Each:
        """Rows of a batch of the validation data: beside a loader, arrays have the default."""
        assert self.validation is not None
        return 32 if self.data.form != "arrays" and self.validation.form == "arrays" else self.batch


@dataclass(frozen=True)
class Evaluate(Verb):
    """Evaluate all members."""

    data: Data = Data()
    batch: Each = 4


@dataclass(frozen=True)
class Predict(Verb):
    """Predict with all members."""

    data: Data = Data()
    batch: Each = 4


@dataclass(frozen=True)
class Plan(Verb):
    """Ask for the plan, which must change nothing."""

    data: Data | None = None


@dataclass(frozen=True)
class Add(Verb):
    """Let a new model join, and compile it."""

    net: Any = None
    recipe: Recipe = Recipe()


@dataclass(frozen=True)
class Drop(Verb):
    """Let a member go, unless it is the last."""

    member: int = 0


@dataclass(frozen=True)
class Clone(Verb):
    """Clone a member."""

    member: int = 0


@dataclass(frozen=True)
class Freeze(Verb):
    """Freeze or unfreeze a part of a member's model."""

    member: int = 0
    part: int = 0
    on: bool = True


@dataclass(frozen=True)
class Edit(Verb):
    """Change a member's weights by hand. `how`: "scale", "copy" (from another member) or "attribute"."""

    member: int = 0
    how: str = "scale"


@dataclass(frozen=True)
class Train(Verb):
    """Train a member's model by a loop of one's own."""

    member: int = 0
    data: Data = Data()


@dataclass(frozen=True)
class Stop(Verb):
    """Stop a member; only in a callback."""

    member: int = 0


@dataclass(frozen=True)
class Turn(Verb):
    """Turn a knob that an objective reads."""

    value: float = 0.5


@dataclass(frozen=True)
class Reload(Verb):
    """Save the fleet, load it, and compile it."""

    recipe: Recipe = Recipe()


@dataclass(frozen=True)
class Program:
    """Models, and what is done with them."""

    target: str
    nets: tuple[Any, ...]
    verbs: tuple[Verb, ...]
    task: str = "numbers"
    dtype: str = "float64"
    devices: str = "cpu"
    build: bool = False


def turns(value: Each, number: int) -> Any:
    """A member's own value."""
    return value[number % len(value)] if isinstance(value, tuple) else value


def short(value: Any) -> str:
    """Python that makes a value of a program: without what is at its default."""
    if isinstance(value, tuple):
        return f"({', '.join(map(short, value))}{',' if len(value) == 1 else ''})"
    if not hasattr(value, "__dataclass_fields__"):
        return repr(value)
    given = [
        f"{field.name}={short(getattr(value, field.name))}"
        for field in fields(value)
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(given)})"


def script(program: Program) -> str:
    """A script that runs a program, in the root of the repository."""
    verbs = "".join(f"        {short(verb)},\n" for verb in program.verbs)
    rest = "".join(
        f"    {field.name}={getattr(program, field.name)!r},\n"
        for field in fields(program)
        if field.name in ("task", "dtype", "devices", "build") and getattr(program, field.name) != field.default
    )
    nets = "".join(f"        {short(net)},\n" for net in program.nets)
    return (
        f"from tests.fuzz.programs import *\nfrom tests.fuzz.running import check\n"
        f"from tests.fuzz.models_{program.target.partition('-')[0]} import Net\n\n"
        f"check(Program(\n    {program.target!r},\n    nets=(\n{nets}    ),\n"
        f"    verbs=(\n{verbs}    ),\n{rest}))\n"
    )

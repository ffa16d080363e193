"""One model cut into stages of even measured time, for `Chain`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from modelfleet.errors import InputError
from modelfleet.formatting import count, without_period
from modelfleet.frameworks import adapter, adapter_of
from modelfleet.frameworks.pieces import CannotCutError, Piece, Pieces, Timing
from modelfleet.graph.cutting import best_cuts
from modelfleet.graph.split_printing import as_text
from modelfleet.trees import leaves
from modelfleet.types import Model, Tree

Part = tuple[int, int, tuple[str, ...]]
"""A stage as `Pieces.build` takes it: the first piece, the piece after the last, and the values it returns."""


@dataclass(frozen=True)
class StageLink:
    """An output of one stage that is an input of another."""

    source: str
    """Name of the stage; "" if the value is an input of the whole model."""
    output: int
    """Number of the output, or of the model's input."""
    target: str
    input: int
    """Number of the positional argument of `target`."""
    bytes: int
    """Size for a batch like the example."""


@dataclass(frozen=True)
class Split:
    """A model cut into stages. `print(split)` shows them with their times, and what each cut costs.

    The stages are called with positional tensors. Each returns one tensor, or a tuple if others need several. The
    last stage returns what the model returns. The stages have the model's own parameters and buffers: to
    train them is to train the model.

    Attributes:
        stages: The stages by name, `"stage0"`, `"stage1"`, …
        links: Which output of which stage is which input of which stage.
        timings: Seconds forward and backward of each stage, measured on the example.
        parameters: How many parameters each stage has.
        memory: Bytes that each stage takes: weights, and for training gradients, two moments of an optimizer and
            activations.
        paths: For each stage, the names of its parameters and buffers in the model.
        reasons: How the model was cut, in sentences.
        model: The model.
    """

    stages: Mapping[str, Model]
    links: tuple[StageLink, ...]
    timings: tuple[Timing, ...]
    parameters: tuple[int, ...]
    memory: tuple[int, ...]
    paths: Mapping[str, Mapping[str, str]]
    reasons: tuple[str, ...]
    model: Model

    @property
    def seconds(self) -> tuple[float, ...]:
        """Return the seconds that each stage takes, forward and backward together."""
        return tuple(timing.total for timing in self.timings)

    def __str__(self) -> str:
        return as_text(self)


@dataclass(frozen=True)
class CutTimes:
    """The times of both stages for every cut of a model in two.

    Attributes:
        chosen: Index of the cut that `split` chooses.
        seconds: Seconds of the first and the second stage for each cut.
    """

    chosen: int
    seconds: tuple[tuple[float, float], ...]


def split(
    model: Model,
    stages: int,
    example: Tree,
    *,
    memory: float | Sequence[float] | None = None,
    train: bool = True,
) -> Split:
    """Cut a model into stages of even measured time.

    The parts of the model run on the example and are timed. The slowest stage becomes as fast as possible; among
    cuts that are equally good, the one that sends the fewest bytes is taken. A skip connection over a cut goes
    straight from the stage that makes it to every stage that needs it.

    Args:
        model: A torch module, or a Keras model that is Functional or Sequential.
        stages: The number of stages.
        example: Inputs like those of a micro-batch: an array, a tuple of arrays, or a dict of them. The number of
            rows may be another one later; all other lengths are those of the example.
        memory: Bytes that each stage may take: one number, or one for each stage.
        train: Count the time of the backward pass, and the memory of gradients, optimizer and activations.

    Returns:
        The stages, and the links between them, as `Chain` takes them.

    Raises:
        InputError: The model can't be cut into so many stages, does not accept the example, or no cut fits into
            the memory.

    Example:
        >>> import numpy as np
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        >>> cut = split(net, 2, np.zeros((16, 8), np.float32))
        >>> list(cut.stages)
        ['stage0', 'stage1']
    """
    limits = _limits(stages, memory)
    if not leaves(example) or any(0 in np.shape(leaf) for leaf in leaves(example)):
        raise InputError("the example has no rows. Give inputs like those of a micro-batch, with a few rows.")
    try:
        found = _pieces(model, stages, example, train)
        if stages > len(found.pieces):
            raise InputError(
                f"stages={stages}, but the model can be cut into {count(len(found.pieces), 'piece')} at most: "
                f"{'; '.join(found.reasons)}. Ask for {len(found.pieces)} or fewer."
            )
        cuts = best_cuts(found.pieces, stages, limits)
        parts = _parts(found.pieces, cuts)
        found.check(parts)
    except CannotCutError as error:
        raise _refused(model, error) from error
    return _split(model, found, parts)


def cut_times(model: Model, example: Tree, *, train: bool = True) -> CutTimes:
    """Measure every cut of a model in two, to see how good the cut of `split` is."""
    try:
        found = _pieces(model, 2, example, train)
    except CannotCutError as error:
        raise _refused(model, error) from error
    (chosen,) = best_cuts(found.pieces, 2)
    parts = [part for cut in range(1, len(found.pieces)) for part in _parts(found.pieces, (cut,))]
    seconds = [timing.total for timing in found.measure(parts)]
    return CutTimes(chosen - 1, tuple(zip(seconds[::2], seconds[1::2], strict=True)))


def _limits(stages: int, memory: float | Sequence[float] | None) -> list[float] | None:
    """Return the bytes that each stage may take, after a check of what was given."""
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise InputError(f"stages={stages!r}; expected a whole number, 1 or more. Give one stage per device.")
    if memory is None:
        return None
    limits = [float(memory)] * stages if isinstance(memory, int | float) else [float(own) for own in memory]
    if len(limits) != stages:
        raise InputError(
            f"memory has {len(limits)} numbers for {stages} stages. Give one number, or one for each stage."
        )
    wrong = next((limit for limit in limits if not limit > 0), None)
    if wrong is not None:
        raise InputError(f"memory holds {wrong}; expected bytes, more than 0, such as 8e9.")
    return limits


def _pieces(model: Model, stages: int, example: Tree, train: bool) -> Pieces:
    framework = adapter_of(model, "the model")
    if not hasattr(framework, "pieces"):
        raise InputError(
            f"the model is one of {framework.NAME}, which mf.split can't cut; it cuts torch modules and Keras "
            f"models. Cut it by hand: mf.Chain([first, second])."
        )
    framework.check_model(model, "the model")
    return adapter(framework.NAME).pieces(model, stages, example, train)


def _refused(model: Model, error: CannotCutError) -> InputError:
    return InputError(
        f"the {type(model).__name__} can't be cut: {without_period(error)}. Cut it by hand: write its parts as "
        f"models of their own, and give mf.Chain([first, second])."
    )


def _parts(pieces: Sequence[Piece], cuts: Sequence[int]) -> list[Part]:
    """Return the stages with the values that later stages need from them."""
    edges = [0, *cuts, len(pieces)]
    parts: list[Part] = []
    for start, stop in pairwise(edges):
        later = {name for piece in pieces[stop:] for name in piece.needs}
        outputs = tuple(name for piece in pieces[start:stop] for name in piece.makes if name in later)
        parts.append((start, stop, outputs))
    return parts


def _split(model: Model, found: Pieces, parts: Sequence[Part]) -> Split:
    names = [f"stage{number}" for number in range(len(parts))]
    built = [found.build(*part) for part in parts]
    # Where each value comes from, and its size.
    sources = {value: ("", number, size) for number, (value, size) in enumerate(found.inputs.items())}
    sizes = {value: size for piece in found.pieces for value, size in piece.makes.items()}
    for name, (_, _, outputs) in zip(names, parts, strict=True):
        sources |= {value: (name, number, sizes[value]) for number, value in enumerate(outputs)}
    links = []
    for name, stage in zip(names, built, strict=True):
        for number, value in enumerate(stage.inputs):
            source, output, size = sources[value]
            links.append(StageLink(source, output, name, number, size))
    own = [found.pieces[start:stop] for start, stop, _ in parts]
    return Split(
        stages={name: stage.model for name, stage in zip(names, built, strict=True)},
        links=tuple(links),
        timings=tuple(found.measure(parts)),
        parameters=tuple(sum(piece.parameters for piece in pieces) for pieces in own),
        memory=tuple(sum(piece.memory for piece in pieces) for pieces in own),
        paths={name: stage.paths for name, stage in zip(names, built, strict=True)},
        reasons=(*found.reasons, *_described(names, own)),
        model=model,
    )


def _described(names: Sequence[str], own: Sequence[Sequence[Piece]]) -> list[str]:
    return [f"{name} begins at {pieces[0].name}" for name, pieces in zip(names[1:], own[1:], strict=True)]

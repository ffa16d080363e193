"""Access to the state of a fit's members between two steps, whatever lanes and workers they are in."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from modelfleet.errors import InputError
from modelfleet.lanes.lane import Lane
from modelfleet.runs.lane_run import LaneRun
from modelfleet.types import Arrays, State, Tensor
from modelfleet.unknown_names import unknown

Parts = dict[str, Arrays]
"""Arrays `(member, …)` by part and name, in the layout of the models."""


class MemberAccess:
    """Reads and writes the state of a fit's members as NumPy arrays.

    Args:
        names: The names of all members, in their order.
        run_of: Returns the run of a member's lane if no thread or worker is taking its steps now.
    """

    def __init__(self, names: Sequence[str], run_of: Callable[[str], LaneRun]) -> None:
        self._names, self._run_of = list(names), run_of

    def training(self) -> tuple[str, ...]:
        """Return the members that are training and have not failed, in the order of the fleet."""
        found: set[str] = set()
        for run, names in self._by_run(self._names):
            engine = run.bring_here().engine
            fine = {run.lane.name_in(int(slot)) for slot in np.flatnonzero(engine.trouble() == 0)}
            found |= fine.intersection(run.training(), names)
        return tuple(name for name in self._names if name in found)

    def read(self, names: Sequence[str], parts: Collection[str]) -> Parts:
        """Return a copy of some parts of the state, `(member, …)` in the order of `names`.

        Raises:
            InputError: The members do not have the same structure.
        """
        _refuse_names(names)
        pieces = [
            (some, _as_arrays(lane, state, some[0]))
            for run, own in self._by_run(names)
            for lane in [run.bring_here()]
            for alike in (_by_optimizer(lane, own) if "optimizer" in parts else [own])
            for some, state in lane.read_apart(alike, parts)
        ]
        return _joined(names, pieces, parts)

    def write(self, names: Sequence[str], state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Replace some of the state by arrays as of `read`. What is not given stays as it is.

        Raises:
            InputError: No part that is given has a name in a member's state.
        """
        row = {name: number for number, name in enumerate(names)}
        state = {
            part: {name: _rows(name, array, names) for name, array in own.items()} for part, own in state.items()
        }
        for run, own in self._by_run(names):
            lane = run.bring_here(to_change=True)
            for some in lane.by_width(own):
                rows = [row[name] for name in some]
                given = {part: {name: array[rows] for name, array in own.items()} for part, own in state.items()}
                if "optimizer" in given:  # engines take the state of an optimizer as a whole
                    given["optimizer"] = {**self.read(some, ["optimizer"])["optimizer"], **given["optimizer"]}
                lane.write(some, _as_stored(lane, given, some[0]))

    def hyperparameters(self, name: str) -> dict[str, float]:
        """Return the hyperparameters that a member has now, before its schedule."""
        run = self._run_of(name)
        tensors, state = self._tensors_of(name)
        own = {key: float(state[tensor][0]) for key, tensor in tensors.items()}
        return {**run.factors.of(run.lane.positions[name]), **own}

    def change_hyperparameters(self, name: str, values: Mapping[str, float]) -> None:
        """Give a member other hyperparameters for the rest of the fit. Its schedule continues from them.

        Raises:
            InputError: The member has no such hyperparameter, or was compiled with 0.
        """
        for key, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise InputError(f"{key} of member {name!r} would become {value!r}; expected a number.")
        run = self._run_of(name)
        tensors, state = self._tensors_of(name)
        run.bring_here(to_change=True)
        run.factors.change(
            run.lane.positions[name], {key: value for key, value in values.items() if key not in tensors}
        )
        new = {tensors[key]: np.full_like(state[tensors[key]], values[key]) for key in tensors if key in values}
        if new:
            self.write([name], {"optimizer": new})

    def _tensors_of(self, name: str) -> tuple[dict[str, str], Arrays]:
        """Return the hyperparameters that are tensors of a member's optimizer, and the optimizer's state."""
        state = self.read([name], ["optimizer"])["optimizer"]
        return self._run_of(name).lane.engine.hyperparameters_in(state), state

    def rows(self, name: str) -> int | None:
        """Return the number of rows in a member's data; None if only its loader knows."""
        run = self._run_of(name)
        return None if run.rows is None else int(run.rows[run.lane.positions[name]])

    def as_snapshot(self, name: str, parts: Parts) -> State:
        """Return arrays as tensors of a member's framework, which a checkpoint can hold."""
        tensor = self._run_of(name).lane.engine.tensor
        return {part: {key: tensor(array) for key, array in own.items()} for part, own in parts.items()}

    def from_snapshot(self, name: str, snapshot: State) -> Parts:
        """Return the arrays of `as_snapshot`."""
        host = self._run_of(name).lane.members[0].framework.arrays.host
        return {part: {key: np.array(host(own[key])) for key in own} for part, own in snapshot.items()}

    def _by_run(self, names: Sequence[str]) -> Iterator[tuple[LaneRun, list[str]]]:
        found: dict[int, tuple[LaneRun, list[str]]] = {}
        for name in names:
            run = self._run_of(name)
            found.setdefault(id(run), (run, []))[1].append(name)
        yield from found.values()


def _refuse_names(names: Sequence[str]) -> None:
    """Raise InputError for names that are not a list of at least one."""
    if isinstance(names, str) or not len(names):
        raise InputError(f"the members are {names!r}; expected a list of at least one name, such as run.active.")


def _by_optimizer(lane: Lane, names: Sequence[str]) -> list[list[str]]:
    """Return members of a lane by the tensors of their optimizers, which may differ."""
    found: dict[frozenset[str] | None, list[str]] = {}
    for name in names:
        tensors = lane.engine.optimizer_tensors(lane.positions[name])
        found.setdefault(None if tensors is None else frozenset(tensors), []).append(name)
    return list(found.values())


def _as_arrays(lane: Lane, state: State, member: str) -> Parts:
    """Return a state of members of a lane as arrays, without what belongs to other members' optimizers."""
    arrays, own = lane.members[0].framework.arrays, lane.engine.optimizer_tensors(lane.positions[member])
    return {
        part: {
            name: _turned(lane, name, _readable(arrays.host(tensor), tensor))
            for name, tensor in tensors.items()
            if part != "optimizer" or own is None or name in own
        }
        for part, tensors in state.items()
    }


def _as_stored(lane: Lane, given: Mapping[str, Arrays], member: str) -> State:
    """Return arrays as `Lane.write` takes them."""
    arrays = lane.members[0].framework.arrays
    ((_, like),) = lane.read_apart([member], list(given))
    for name in dict.fromkeys(name for own in given.values() for name in own):
        if not any(name in like.get(part, {}) for part in given):
            raise unknown(f"weight of member {member!r}", name, [n for own in like.values() for n in own])
    found: State = {part: {} for part in given}
    for part, own in given.items():
        for name, array in own.items():
            if name in like.get(part, {}):
                tensor, turned = like[part][name], _turned(lane, name, array)
                if turned.shape[1:] != tuple(tensor.shape[1:]):
                    needed = _turned(lane, name, np.broadcast_to(np.empty(()), tuple(tensor.shape))).shape[1:]
                    raise InputError(
                        f"{name!r} of member {member!r} would become {array.shape[1:]}; expected {needed}, with "
                        f"the member as one more axis in front."
                    )
                found[part][name] = _storable(turned, tensor, arrays.host(tensor).dtype)
    return found


def _rows(name: str, array: object, names: Sequence[str]) -> np.ndarray:
    """Return an array that was given for some members.

    Raises:
        InputError: It is not an array of numbers with one row for each member.
    """
    found = np.asarray(array)
    if found.dtype.kind not in "biufc" or not found.ndim or len(found) != len(names):
        raise InputError(
            f"{name!r} is {found.shape} of {found.dtype} for {len(names)} members; expected an array of numbers "
            f"with the member as the first axis, as weights(names) returns it."
        )
    return found


def _turned(lane: Lane, name: str, array: np.ndarray) -> np.ndarray:
    """Return an array in the layout of the model, or back from it."""
    return array.swapaxes(1, 2) if array.ndim == 3 and name.rpartition("/")[2] in lane.engine.transposed else array


def _readable(array: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Return the numbers of a tensor that came as an array. Those of bfloat16 come as bits: NumPy lacks it."""
    if "bfloat16" not in str(tensor.dtype):
        return array
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _storable(array: np.ndarray, like: Tensor, dtype: np.dtype) -> np.ndarray:
    """Return an array as that of a tensor of a dtype. Undoes `_readable`, rounding to the nearest number."""
    if "bfloat16" not in str(like.dtype):
        return np.ascontiguousarray(array, dtype=dtype)
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16).view(np.int16)


def _joined(names: Sequence[str], pieces: Sequence[tuple[list[str], Parts]], parts: Collection[str]) -> Parts:
    """Return the arrays of several lanes as one for each name, in the order of `names`."""
    row = {name: number for number, name in enumerate(names)}
    joined: Parts = {part: {} for part in parts}
    for part in parts:
        first, known = pieces[0][0][0], pieces[0][1].get(part, {})
        for some, state in pieces[1:]:
            _refuse_unlike(first, known, some[0], state.get(part, {}))
        for path, array in known.items():
            joined[part][path] = np.empty((len(names), *array.shape[1:]), array.dtype)
            for some, state in pieces:
                joined[part][path][[row[name] for name in some]] = state[part][path]
    return joined


def _refuse_unlike(first: str, known: Arrays, other: str, own: Arrays) -> None:
    """Raise InputError for the first parameter in which two members differ."""
    advice = "Give each kind of member a group of its own (groups=...), or give all the same structure."
    for path in dict.fromkeys([*known, *own]):
        there, here = known.get(path), own.get(path)
        if there is None or here is None:
            having, lacking = (other, first) if there is None else (first, other)
            raise InputError(
                f"members {first!r} and {other!r} can't exchange their state: {having!r} has {path!r}, and "
                f"{lacking!r} has not. {advice}"
            )
        if (there.shape[1:], there.dtype) != (here.shape[1:], here.dtype):
            raise InputError(
                f"members {first!r} and {other!r} can't exchange their state: {path!r} is {_form(there)} in "
                f"{first!r}, and {_form(here)} in {other!r}. {advice}"
            )


def _form(array: np.ndarray) -> str:
    return f"{array.shape[1:]} {array.dtype}"

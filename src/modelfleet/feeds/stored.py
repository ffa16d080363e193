"""Arrays of one verb, each of which is converted once, and stored once on every device that needs it."""

from collections.abc import Sequence

from modelfleet.feeds._base import ArrayOperations
from modelfleet.feeds.checking import as_arrays
from modelfleet.types import Data, NativeDevice, Tensor, Tree


class StoredArrays:
    """What the feeds of one verb store, so that lanes, groups and kinds of data share it.

    It is for one verb, because a user may write to arrays between two of them.
    """

    def __init__(self) -> None:
        # What a key's `id` belongs to is kept with the value, so that no other object gets the same one.
        self._checked: dict[tuple[int, int], tuple[Data, tuple[Tree, int]]] = {}
        self._tensors: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._placed: dict[tuple[object, ...], tuple[Sequence[Tensor], Tensor]] = {}
        self._rooms: dict[tuple[int, NativeDevice], int | None] = {}

    def checked(self, data: Data, arrays: ArrayOperations, label: str) -> tuple[Tree, int]:
        """Return a user's data with an array at every leaf, and the number of rows (see `as_arrays`)."""
        key = id(data), id(arrays)
        if key not in self._checked:
            self._checked[key] = data, as_arrays(data, arrays, label)
        return self._checked[key][1]

    def tensor(self, leaf: Tensor, arrays: ArrayOperations) -> Tensor:
        """Return an array as a tensor, wherever it is now."""
        key = id(leaf), id(arrays)
        if key not in self._tensors:
            self._tensors[key] = leaf, arrays.place(leaf, None)
        return self._tensors[key][1]

    def fit(self, columns: Sequence[Sequence[Tensor]], arrays: ArrayOperations, device: NativeDevice) -> bool:
        """Return True if a device has room for these columns of tensors, which `joined` will store there."""
        room = self.room(arrays, device)
        if room is None:
            return True
        new = [column for column in columns if self._key(column, arrays, device) not in self._placed]
        size = sum(tensor.nbytes for column in new for tensor in column if not _is_on(column, device))
        if size > room:
            return False
        self._rooms[id(arrays), device] = room - size
        return True

    def room(self, arrays: ArrayOperations, device: NativeDevice) -> int | None:
        """Return how many bytes may still be stored on a device; None for any number."""
        key = id(arrays), device
        if key not in self._rooms:
            self._rooms[key] = arrays.room(device)
        return self._rooms[key]

    def joined(self, column: Sequence[Tensor], arrays: ArrayOperations, device: NativeDevice) -> Tensor:
        """Return tensors one after the other on a device, or on the host if that is None."""
        key = self._key(column, arrays, device)
        if key not in self._placed:
            joined = column[0] if len(column) == 1 else arrays.concatenate(column)
            self._placed[key] = column, arrays.on_host(joined) if device is None else arrays.place(joined, device)
        return self._placed[key][1]

    @staticmethod
    def _key(column: Sequence[Tensor], arrays: ArrayOperations, device: NativeDevice) -> tuple[object, ...]:
        return id(arrays), device, *map(id, column)


def _is_on(column: Sequence[Tensor], device: NativeDevice) -> bool:
    """Return True if a column is a tensor that the user has put on the device."""
    return len(column) == 1 and getattr(column[0], "device", None) == device

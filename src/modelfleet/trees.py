"""Trees of arrays: nested dicts, lists, tuples and named tuples.

Everything else is a leaf. None holds no array: it stays where it is and is never counted. Every mapping is a
dict here, Hugging Face's `BatchEncoding` too, and comes out as one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

IsLeaf = Callable[[Any], bool]


def leaves(tree: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """Every leaf, from left to right. `is_leaf` can call a container a leaf."""
    found: list[Any] = []
    _gather(tree, is_leaf, found)
    return found


def paths(tree: Any, is_leaf: IsLeaf | None = None) -> list[tuple[str, Any]]:
    """Every leaf with its path: `"[0]"`, `"input_ids"`, `"inputs.image[1]"`; `""` if the tree is one leaf."""
    return list(_walk(tree, "", is_leaf))


def map_tree(fn: Callable[[Any], Any], tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """The same tree with `fn(leaf)` in the place of every leaf."""
    if tree is None:
        return None
    if is_leaf is not None and is_leaf(tree):
        return fn(tree)
    if isinstance(tree, tuple):
        values = [map_tree(fn, value, is_leaf) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        return [map_tree(fn, value, is_leaf) for value in tree]
    if isinstance(tree, Mapping):
        return {key: map_tree(fn, value, is_leaf) for key, value in tree.items()}
    return fn(tree)


def rebuild(tree: Any, values: Iterable[Any], is_leaf: IsLeaf | None = None) -> Any:
    """The same tree with `values` in the place of its leaves, from left to right."""
    following = iter(values)
    return map_tree(lambda _: next(following), tree, is_leaf)


def _gather(tree: Any, is_leaf: IsLeaf | None, found: list[Any]) -> None:
    # What `_walk` does, without the paths: this one is called for every batch.
    if tree is None:
        return
    if is_leaf is not None and is_leaf(tree):
        found.append(tree)
    elif isinstance(tree, list | tuple):
        for value in tree:
            _gather(value, is_leaf, found)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            _gather(value, is_leaf, found)
    else:
        found.append(tree)


def _walk(tree: Any, path: str, is_leaf: IsLeaf | None) -> Iterator[tuple[str, Any]]:
    if tree is None:
        return
    if is_leaf is not None and is_leaf(tree):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _walk(value, _dotted(path, key), is_leaf)
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for field, value in zip(tree._fields, tree, strict=True):
            yield from _walk(value, _dotted(path, field), is_leaf)
    elif isinstance(tree, list | tuple):
        for position, value in enumerate(tree):
            yield from _walk(value, f"{path}[{position}]", is_leaf)
    else:
        yield path, tree


def _dotted(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)

"""Trees of arrays: nested dicts, lists, tuples and named tuples.

Everything else is a leaf. None is not a leaf: it stays where it is. Every mapping counts as a dict, including
Hugging Face's `BatchEncoding`, and is returned as one.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from modelfleet.types import Tree

IsLeaf = Callable[[Any], bool]


def leaves(tree: Tree) -> list[Any]:
    """Return every leaf, from left to right."""
    found: list[Any] = []
    _gather(tree, found)
    return found


def paths(tree: Tree, is_leaf: IsLeaf | None = None) -> list[tuple[str, Any]]:
    """Return every leaf with its path: `"[0]"`, `"inputs.image[1]"`; `""` if the tree is one leaf.

    Here and below, `is_leaf` returns True for containers to treat as leaves.
    """
    return list(_walk(tree, "", is_leaf))


def map_tree(fn: Callable[[Any], Any], tree: Tree, is_leaf: IsLeaf | None = None) -> Tree:
    """Return the same tree with every leaf replaced by `fn(leaf)`."""
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


def rebuild(tree: Tree, values: Iterable[Any], is_leaf: IsLeaf | None = None) -> Tree:
    """Return the same tree with its leaves replaced by `values`, from left to right."""
    following = iter(values)
    return map_tree(lambda _: next(following), tree, is_leaf)


def map_trees(fn: Callable[[list[Any]], Any], trees: Sequence[Tree], is_leaf: IsLeaf | None = None) -> Tree:
    """Return the first tree with every leaf replaced by `fn(leaves)`, called with that leaf of all trees.

    The order of a dict's keys does not matter, and a list equals a tuple.

    Raises:
        ValueError: If the trees differ in structure.
    """
    return _together(fn, trees, is_leaf, "")


def structure(tree: Tree) -> Hashable:
    """Return a key that is equal for trees that differ only in their leaves."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return dict, tuple((key, structure(value)) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree), tuple(map(structure, tree))
    return "leaf"


def _together(fn: Callable[[list[Any]], Any], trees: Sequence[Tree], is_leaf: IsLeaf | None, path: str) -> Tree:
    kinds = [_kind(tree, is_leaf) for tree in trees]
    kind = kinds[0]
    for other in kinds:
        if other != kind:
            where = path or "the whole"
            raise ValueError(f"{where} is {_described(kind)} in one of them and {_described(other)} in another")
    if kind is None:
        return None
    if kind == "leaf":
        return fn(list(trees))
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: _together(fn, [tree[key] for tree in trees], is_leaf, _dotted(path, key)) for key in first}
    named = getattr(first, "_fields", None)
    places = [_dotted(path, name) for name in named or ()] or [f"{path}[{place}]" for place in range(len(first))]
    values = [_together(fn, list(parts), is_leaf, place) for place, *parts in zip(places, *trees, strict=True)]
    if named is not None:
        return type(first)(*values)
    return values if isinstance(first, list) else tuple(values)


def _kind(tree: Tree, is_leaf: IsLeaf | None) -> Hashable:
    """Return what two trees must have in common at their top level."""
    if tree is None:
        return None
    if is_leaf is not None and is_leaf(tree):
        return "leaf"
    if isinstance(tree, Mapping):
        return frozenset(tree)
    if isinstance(tree, list | tuple):
        return getattr(tree, "_fields", len(tree))  # not the class: another process has its own
    return "leaf"


def _described(kind: Hashable) -> str:
    if isinstance(kind, frozenset):
        return f"a dict of {', '.join(sorted(map(repr, kind))) or 'nothing'}"
    if isinstance(kind, tuple):
        return f"a named tuple of {', '.join(kind) or 'nothing'}"
    if isinstance(kind, int):
        return f"a list or tuple of {kind}"
    return "None" if kind is None else "an array"


def _gather(tree: Tree, found: list[Any]) -> None:
    # Like `_walk` without the paths, since this is called for every batch.
    if isinstance(tree, list | tuple):
        for value in tree:
            _gather(value, found)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            _gather(value, found)
    elif tree is not None:
        found.append(tree)


def _walk(tree: Tree, path: str, is_leaf: IsLeaf | None) -> Iterator[tuple[str, Any]]:
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

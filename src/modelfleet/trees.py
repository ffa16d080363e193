"""Trees of arrays: nested dicts, lists, tuples and named tuples.

Everything else is a leaf. None holds no array: it stays where it is and is never counted. Every mapping is a
dict here, Hugging Face's `BatchEncoding` too, and comes out as one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def map_trees(fn: Callable[[list[Any]], Any], trees: Sequence[Any], is_leaf: IsLeaf | None = None) -> Any:
    """The first tree with `fn(leaves)` in the place of every leaf: of the leaves that the trees have there.

    Dicts are compared by their keys, in whatever order these come; a list and a tuple are alike. Raises
    `ValueError` where the trees differ.
    """
    return _together(fn, trees, is_leaf, "")


def structure(tree: Any) -> Any:
    """What two trees have in common if they differ in their leaves alone; can be a key of a dict."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return dict, tuple((key, structure(value)) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree), tuple(map(structure, tree))
    return "leaf"


def _together(fn: Callable[[list[Any]], Any], trees: Sequence[Any], is_leaf: IsLeaf | None, path: str) -> Any:
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


def _kind(tree: Any, is_leaf: IsLeaf | None) -> Any:
    """What has to be the same of two trees, without what they hold."""
    if tree is None:
        return None
    if is_leaf is not None and is_leaf(tree):
        return "leaf"
    if isinstance(tree, Mapping):
        return frozenset(tree)
    if isinstance(tree, list | tuple):
        return getattr(tree, "_fields", len(tree))  # a class that was sent from another process is another one
    return "leaf"


def _described(kind: Any) -> str:
    if isinstance(kind, frozenset):
        return f"a dict of {', '.join(sorted(map(repr, kind))) or 'nothing'}"
    if isinstance(kind, tuple):
        return f"a named tuple of {', '.join(kind) or 'nothing'}"
    if isinstance(kind, int):
        return f"a list or tuple of {kind}"
    return "None" if kind is None else "an array"


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

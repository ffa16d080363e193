"""Topologies: which node's tensors go to which node, checked before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from modelfleet.errors import InputError
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tree
from modelfleet.unknown_names import unknown

INPUT = "input"
"""Name of the source of a graph's own data in edges."""

Key: TypeAlias = str | int | None
"""Part of a node's outputs, or one of its inputs: a name, a position, or None for the whole."""
EdgeLike: TypeAlias = "Edge | tuple[str, str]"


@dataclass(frozen=True)
class Edge:
    """An edge of a graph: tensors that go from one node to another.

    Args:
        source: The node that the tensors come from, or "input" for the graph's own data. `"encoder.features"` and
            `"encoder.0"` are one part of its output: the value of that name in a dict or object, or the one at
            that position in a tuple. `"input.image"` is one part of x.
        target: The node that takes them. `"head.x"` names an argument of its `forward`, `"head.0"` a position.
        detach: True if no gradient goes back over this edge.

    Example:
        >>> mf.Graph(models, [mf.Edge("encoder", "probe", detach=True), ("encoder", "head")], outputs="head")
    """

    source: str
    target: str
    detach: bool = False


@dataclass(frozen=True)
class Link:
    """An edge of a topology, with its ends taken apart."""

    source: str
    output: Key
    target: str
    input: Key
    differentiable: bool = True

    @property
    def name(self) -> str:
        """Return the name that schedules and errors use."""
        return f"{_joined(self.source, self.output)}→{_joined(self.target, self.input)}"


@dataclass(frozen=True)
class Topology:
    """Nodes and edges of a graph without cycles."""

    nodes: tuple[str, ...]
    """In topological order, and otherwise in the order in which they were given."""
    links: tuple[Link, ...]
    """Edges between nodes."""
    inputs: tuple[Link, ...]
    """Edges from the graph's own data."""
    outputs: tuple[str, ...]
    """Nodes whose outputs are the graph's."""
    into: Mapping[str, tuple[Link, ...]] = field(init=False, repr=False, compare=False)
    """Edges from the data and from nodes into each node, in their order."""
    out_of: Mapping[str, tuple[Link, ...]] = field(init=False, repr=False, compare=False)
    """Edges from each node to other nodes."""

    def __post_init__(self) -> None:
        every = (*self.inputs, *self.links)
        into = {name: tuple(link for link in every if link.target == name) for name in self.nodes}
        out_of = {name: tuple(link for link in self.links if link.source == name) for name in self.nodes}
        object.__setattr__(self, "into", into)
        object.__setattr__(self, "out_of", out_of)

    def arguments(self, node: str, values: Mapping[Link, Tree]) -> Tree:
        """Return what a node's model is called with: one tree, a tuple of arguments, or a dict of keywords."""
        links = self.into[node]
        if len(links) == 1 and links[0].input is None:
            return values[links[0]]
        if isinstance(links[0].input, str):
            return {link.input: values[link] for link in links}
        if links[0].input is None:
            return tuple(values[link] for link in links)
        by_position = sorted(links, key=lambda link: link.input)  # pyrefly: ignore
        return tuple(values[link] for link in by_position)

    def places(self, node: str, values: Mapping[Link, Tree]) -> dict[Link, list[int]]:
        """Return for each edge into a node the numbers of its leaves among those of `arguments`."""
        marked = {link: map_tree(lambda _, link=link: link, values[link]) for link in self.into[node]}
        found: dict[Link, list[int]] = {link: [] for link in marked}
        for number, link in enumerate(leaves(self.arguments(node, marked))):
            found[link].append(number)
        return found


def select(tree: Tree, key: Key, whose: str) -> Tree:
    """Return one part of a node's output, or of the data.

    Raises:
        InputError: There is no such part.
    """
    if key is None:
        return tree
    if isinstance(tree, Mapping) and (key in tree or str(key) in tree):
        return tree[key if key in tree else str(key)]
    if isinstance(key, int) and isinstance(tree, Mapping) and key < len(tree):
        return list(tree.values())[key]  # of a split model, whose inputs are numbered
    if isinstance(key, int) and isinstance(tree, tuple | list) and key < len(tree):
        return tree[key]
    if isinstance(key, str) and hasattr(tree, "_fields") and key in tree._fields:
        return getattr(tree, key)
    if isinstance(tree, Mapping):
        has = f"a dict of {', '.join(map(repr, tree))}"
    elif isinstance(tree, tuple | list):
        has = f"{len(tree)} parts, 0 to {len(tree) - 1}"
    else:
        has = "one tensor"
    raise InputError(f"{whose} has no part {key!r}: it is {has}. Name one of its parts, or take the whole.")


def place_of(tree: Tree, key: Key, whose: str) -> list[int]:
    """Return the numbers of the leaves of a tree that one part of it has."""
    numbers = iter(range(len(leaves(tree))))
    return leaves(select(map_tree(lambda _: next(numbers), tree), key, whose))


def make_topology(
    nodes: Sequence[str], edges: Sequence[EdgeLike], outputs: str | Sequence[str] | None = None
) -> Topology:
    """Return the topology of nodes and edges.

    A node that no edge leads to takes the graph's data.

    Raises:
        InputError: An edge names no node, there is a cycle, or the ends of edges do not fit each other.
    """
    links = [_parse(edge, nodes) for edge in edges]
    reached = {link.target for link in links}
    links += [Link(INPUT, None, name, None) for name in nodes if name not in reached]
    for name in nodes:
        _check_arguments(name, [link for link in links if link.target == name])
    for index, link in enumerate(links):
        if link in links[:index]:
            source = _joined(link.source, link.output)
            raise InputError(
                f"the edge {link.name} is given twice. Leave one out; to give {link.target!r} a tensor as two "
                f'arguments, name them, as in ("{source}", "{link.target}.0") and ("{source}", "{link.target}.1").'
            )
    ordered = _order(nodes, [link for link in links if link.source != INPUT])
    chosen = _outputs(nodes, links, outputs)
    inner = tuple(link for link in links if link.source != INPUT)
    return Topology(ordered, inner, tuple(link for link in links if link.source == INPUT), chosen)


def _parse(edge: EdgeLike, nodes: Sequence[str]) -> Link:
    if isinstance(edge, tuple) and len(edge) == 2 and all(isinstance(end, str) for end in edge):
        edge = Edge(*edge)
    if not isinstance(edge, Edge):
        raise InputError(f'an edge is {edge!r}. Give pairs of names, ("encoder", "head"), or mf.Edge(...).')
    source, output = _end(edge.source, (*nodes, INPUT), "the source")
    target, given = _end(edge.target, nodes, "the target")
    if source == target:
        raise InputError(f"the edge {edge.source!r} → {edge.target!r} leads from a node to itself. Leave it out.")
    return Link(source, output, target, given, not edge.detach)


def _end(text: str, nodes: Sequence[str], what: str) -> tuple[str, Key]:
    """Return the node and the part that one end of an edge names. Names of nodes may have dots."""
    if text in nodes:
        return text, None
    name, _, key = text.rpartition(".")
    if name in nodes and key:
        return name, int(key) if key.isdigit() else key
    error = unknown("node", text, nodes)
    raise InputError(f"{what} of an edge: {error}") from None


def _check_arguments(name: str, links: Sequence[Link]) -> None:
    kinds = {type(link.input) for link in links}
    keys = [link.input for link in links if link.input is not None]
    if len(kinds) > 1:
        listed = ", ".join(link.name for link in links)
        raise InputError(
            f"some edges into {name!r} name an argument and some do not: {listed}. Name one on each, as in "
            f'("encoder", "{name}.x"), or on none.'
        )
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"two edges give {name!r} its argument {twice!r}. Give each its own.")
    missing = set(range(len(keys))).difference(keys) if kinds == {int} else set()
    if missing:
        raise InputError(
            f"the edges into {name!r} give its arguments {', '.join(map(str, sorted(keys, key=int)))}, and none "
            f"gives argument {min(missing)}. Count from 0, or use the names of arguments."
        )


def _order(nodes: Sequence[str], links: Sequence[Link]) -> tuple[str, ...]:
    """Return the nodes in topological order. Raises InputError for a cycle."""
    parents = {name: {link.source for link in links if link.target == name} for name in nodes}
    done: list[str] = []
    while len(done) < len(nodes):
        ready = next((name for name in nodes if name not in done and parents[name] <= set(done)), None)
        if ready is None:
            raise InputError(
                f"the edges form a cycle: {' → '.join(_cycle(parents, set(done)))}. A graph's tensors go forward "
                f"only: leave out one of these edges."
            )
        done.append(ready)
    return tuple(done)


def _cycle(parents: Mapping[str, set[str]], done: set[str]) -> list[str]:
    """Return the nodes of a cycle, the first one again at the end."""
    path = [next(name for name in parents if name not in done)]
    while path[-1] not in path[:-1]:
        path.append(next(parent for parent in sorted(parents[path[-1]]) if parent not in done))
    return path[path.index(path[-1]) :][::-1]


def _outputs(nodes: Sequence[str], links: Sequence[Link], outputs: str | Sequence[str] | None) -> tuple[str, ...]:
    if outputs is None:
        sources = {link.source for link in links}
        return tuple(name for name in nodes if name not in sources)
    chosen = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    for name in chosen:
        if name not in nodes:
            raise unknown("node", name, nodes)
    if not chosen:
        raise InputError("outputs is empty. Name the nodes whose outputs the graph returns.")
    return chosen


def _joined(node: str, key: Key) -> str:
    return node if key is None else f"{node}.{key}"

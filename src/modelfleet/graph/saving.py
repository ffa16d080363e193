"""Chains and graphs on disk: the tensors of all nodes, and a JSON manifest with the edges and the recipe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from modelfleet.each import Each
from modelfleet.errors import InputError, StoreError
from modelfleet.fingerprints import fingerprint
from modelfleet.fleet import Fleet
from modelfleet.frameworks import files
from modelfleet.frameworks.model_building import is_made, list_models
from modelfleet.frameworks.stacked import WEIGHTS
from modelfleet.graph import saved_fleets
from modelfleet.graph.checkpoints import Paths, by_global_path, by_node
from modelfleet.graph.saved_fleets import FleetEntry, made_fleet
from modelfleet.graph.split import Split
from modelfleet.graph.topology import Edge, Key, Link, Topology
from modelfleet.recipe import Recipe
from modelfleet.store import Saved, read_folder, recipe_json, write_folder
from modelfleet.store.json_schema import check
from modelfleet.types import Json, Model, State

KIND = "graph"
STATE = "state"  # data file
_LINK = {
    "source": str,
    "output": (str, int, None),
    "target": str,
    "input": (str, int, None),
    "differentiable": bool,
}
_SCHEMA = {
    "graph": str,
    "seed": int,
    "epochs": int,
    "nodes": [str],
    "links": [_LINK],
    "inputs": [_LINK],
    "outputs": [str],
    "losses": [str],
    "recipe": (None, {str: object}),
    "fleets": {str: saved_fleets.SCHEMA},
}

ModelsLike: TypeAlias = (
    Mapping[str, Model] | Sequence[Model] | Split | Callable[[], "Mapping[str, Model] | Sequence[Model] | Split"]
)
"""Models to fill: by node, in the order of the nodes, of a split model, or a function that returns them."""


@dataclass(frozen=True)
class SavedGraph:
    """Contents of a saved graph."""

    kind: str
    seed: int
    epochs: int
    topology: Topology
    losses: tuple[str, ...]
    recipe: Recipe | None
    states: dict[str, State]
    """Weights and training state, by node."""
    fleets: Mapping[str, FleetEntry]
    """Nodes that are fleets."""


def save(folder: Path, graph: SavedGraph, paths: Paths) -> None:
    """Save a graph. If that fails, what the folder had before stays whole."""
    manifest = {
        "graph": graph.kind,
        "seed": graph.seed,
        "epochs": graph.epochs,
        "nodes": list(graph.topology.nodes),
        "links": [_encoded(link) for link in graph.topology.links],
        "inputs": [_encoded(link) for link in graph.topology.inputs],
        "outputs": list(graph.topology.outputs),
        "losses": list(graph.losses),
        "recipe": None if graph.recipe is None else recipe_json.encode(graph.recipe),
        "fleets": {name: saved_fleets.encoded(entry) for name, entry in graph.fleets.items()},
    }
    tensors = by_global_path(graph.states, paths, graph.fleets)
    write_folder(folder, {STATE: tensors}, manifest, kind=KIND, writer=files)


def read(
    folder: Path,
    states_of: Callable[
        [Mapping[str, Json], Recipe | None, Mapping[str, FleetEntry]], tuple[Mapping[str, State], Paths]
    ],
    *,
    allow_import: bool,
    verify: bool,
) -> SavedGraph:
    """Return a saved graph.

    Args:
        folder: The folder.
        states_of: Returns the state that the nodes have before they are filled, from the manifest, the recipe and
            the nodes that are fleets.
        allow_import: Import functions that the recipe names.
        verify: Compare checksums.

    Raises:
        StoreError: The folder is damaged, or its tensors do not fit the models.
    """

    def read_all(saved: Saved) -> SavedGraph:
        manifest = saved.manifest
        check_manifest(folder, manifest)
        encoded = manifest["recipe"]
        recipe = None if encoded is None else recipe_json.decode(encoded, allow_import=allow_import)
        fleets = {
            name: saved_fleets.decoded(own, allow_import=allow_import) for name, own in manifest["fleets"].items()
        }
        own, paths = states_of(manifest, recipe, fleets)
        tensors = saved.tensors(STATE, files)
        weights = {node: {part: state[part] for part in WEIGHTS if part in state} for node, state in own.items()}
        states = by_node(tensors, weights, paths, fleets, folder)
        for node, state in own.items():  # a graph that was not trained has no training state
            rest = {part: tensors_ for part, tensors_ in state.items() if part in ("optimizer", "member")}
            if any(path.startswith("member/") for path in tensors):
                states[node] |= by_node(tensors, {node: rest}, paths, fleets, folder)[node]
        topology = Topology(
            tuple(manifest["nodes"]),
            tuple(map(_decoded, manifest["links"])),
            tuple(map(_decoded, manifest["inputs"])),
            tuple(manifest["outputs"]),
        )
        return SavedGraph(
            manifest["graph"],
            manifest["seed"],
            manifest["epochs"],
            topology,
            tuple(manifest["losses"]),
            recipe,
            states,
            fleets,
        )

    return read_folder(folder, read_all, kind=KIND, verify=verify)


def check_manifest(folder: Path, manifest: Mapping[str, Json]) -> None:
    """Raise StoreError for a manifest that is not one of a saved graph."""
    try:
        check(manifest, _SCHEMA, "the manifest")
    except ValueError as error:
        raise StoreError(f"{folder} has a manifest that is not a graph's: {error}. Load another copy.") from error


def recut(recipe: Recipe, losses: Sequence[str], names: Sequence[str]) -> Recipe:
    """Return the recipe of a split model for the stages of another cut. Its last stage has the loss.

    Args:
        recipe: The recipe of the saved stages.
        losses: Those of them that have a loss.
        names: The stages of the other cut.

    Raises:
        InputError: The saved stages differ in more than the loss.
    """

    def value(own: Each, argument: str) -> Any:
        values = list(own.values.values() if isinstance(own.values, Mapping) else own.values)
        if any(fingerprint(other) != fingerprint(values[0]) for other in values):
            raise InputError(
                f"the saved stages were compiled with different values of {argument}, and this cut has other "
                f"stages. Load them in the cut in which they were saved."
            )
        return Each(dict.fromkeys(names, values[0]))

    loss = recipe.loss
    last = loss.values[losses[-1]] if isinstance(loss, Each) and isinstance(loss.values, Mapping) else loss
    return replace(replace(recipe, loss=None).mapped(value), loss=Each({**dict.fromkeys(names), names[-1]: last}))


def made_models(
    factory: Any, nodes: Sequence[str], fleets: Mapping[str, FleetEntry]
) -> dict[str, "Model | Fleet"]:
    """Return the models to fill, by node.

    Args:
        factory: A function that returns the models; or the models, or for each a factory, in a mapping or a list.
        nodes: The names of the saved nodes.
        fleets: Those that are fleets. For each, a fleet, its models, or a function that returns one of these.

    Raises:
        InputError: There are not as many models as nodes.
    """
    if factory is None:
        raise InputError(
            f"the saved graph has the nodes {', '.join(map(repr, nodes))}, and its folder has no code. Give "
            "load the models to fill: mf.Chain.load(folder, [encoder, head]), or a function that returns them."
        )
    given: Any = factory() if callable(factory) and not is_made(factory) else factory
    if isinstance(given, Mapping):
        found = dict(given)
    else:
        models = list_models(given)
        if len(models) != len(nodes):
            raise InputError(f"there are {len(models)} models for {len(nodes)} saved nodes. Give one for each.")
        found = dict(zip(nodes, models, strict=True))
    if set(found) != set(nodes):
        raise InputError(
            f"the models are named {', '.join(map(repr, found))}, and the saved nodes "
            f"{', '.join(map(repr, nodes))}. "
            f"Give a model for each node, by its name."
        )
    return {
        name: made_fleet(own, fleets[name], name) if name in fleets else own if is_made(own) else own()
        for name, own in ((name, found[name]) for name in nodes)
    }


def edges_of(manifest: Mapping[str, Json]) -> list[Edge]:
    """Return the edges of a saved graph."""
    return [
        Edge(_end(link["source"], link["output"]), _end(link["target"], link["input"]), not link["differentiable"])
        for link in (*manifest["inputs"], *manifest["links"])
    ]


def _end(node: str, key: Key) -> str:
    return node if key is None else f"{node}.{key}"


def _encoded(link: Link) -> dict[str, Json]:
    return {
        "source": link.source,
        "output": link.output,
        "target": link.target,
        "input": link.input,
        "differentiable": link.differentiable,
    }


def _decoded(entry: Mapping[str, Json]) -> Link:
    output: Key = entry["output"]
    given: Key = entry["input"]
    return Link(entry["source"], output, entry["target"], given, entry["differentiable"])

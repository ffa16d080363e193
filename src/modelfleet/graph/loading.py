"""Loading chains and graphs that were saved."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelfleet.graph import saving
from modelfleet.graph.chain import Chain
from modelfleet.graph.checkpoints import Paths
from modelfleet.graph.graph import Graph
from modelfleet.graph.placement import DevicesLike
from modelfleet.graph.saved_fleets import FleetEntry, made_fleet
from modelfleet.graph.topology import Edge, Key
from modelfleet.recipe import Recipe
from modelfleet.types import Json, State


def load_graph(folder: Path, factory: Any, *, allow_import: bool, devices: DevicesLike, verify: bool) -> Graph:
    """Load a saved chain or graph. See `modelfleet.load`."""
    made: list[Graph] = []

    def states_of(
        manifest: Mapping[str, Json], recipe: Recipe | None, fleets: Mapping[str, FleetEntry]
    ) -> tuple[Mapping[str, State], Paths]:
        graph = _make(manifest, factory, devices, fleets)
        made.append(graph)
        usable = recipe is not None and not recipe.missing
        return graph._read_states("train" if usable else "predict", recipe if usable else None), graph._paths

    found = saving.read(folder, states_of, allow_import=allow_import, verify=verify)
    (graph,) = made
    graph._take_saved(found)
    return graph


def _make(
    manifest: Mapping[str, Json], factory: Any, devices: DevicesLike, fleets: Mapping[str, FleetEntry]
) -> Graph:
    models = saving.made_models(factory, manifest["nodes"], fleets)
    for name, entry in fleets.items():
        models[name] = made_fleet(models[name], entry, name)
    if manifest["graph"] == Chain.kind:
        return Chain(models, devices=devices, seed=manifest["seed"])
    edges = [_edge(link) for link in (*manifest["inputs"], *manifest["links"])]
    return Graph(models, edges, outputs=manifest["outputs"], devices=devices, seed=manifest["seed"])


def _edge(link: Mapping[str, Json]) -> Edge:
    return Edge(
        _end(link["source"], link["output"]), _end(link["target"], link["input"]), not link["differentiable"]
    )


def _end(node: str, key: Key) -> str:
    return node if key is None else f"{node}.{key}"

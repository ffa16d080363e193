"""Chains: models that stand in a row, each taking what the one before gives."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

from modelfleet.errors import InputError
from modelfleet.frameworks.model_building import is_made, list_models
from modelfleet.graph import saving
from modelfleet.graph.graph import Graph
from modelfleet.graph.placement import DevicesLike
from modelfleet.graph.split import Split
from modelfleet.graph.topology import INPUT, Edge
from modelfleet.types import Json, Model


class Chain(Graph):
    """Models in a row, each on its own device, trained and run as one.

    Args:
        stages: The models, by name or in a list, whose names are then "0", "1", …; or what `split` returned.
        devices: "auto"; devices, over which the stages are spread; or a row for each stage, whose devices share
            its micro-batches: `[["cuda:0", "cuda:1"], ["cuda:2"]]`.
        seed: See `Graph`.

    Raises:
        InputError: There are no stages, or a device does not exist.

    Example:
        >>> chain = mf.Chain([encoder, head], devices="cuda:0,cuda:1")
        >>> chain.compile("adamw", "cross_entropy", lr=mf.each([1e-5, 1e-3]))
        >>> history = chain.fit((x, y), epochs=3, batch_size=64)
        >>> labels = chain.predict(x_new).argmax(1)
    """

    kind = "chain"

    def __init__(
        self,
        stages: Mapping[str, Model] | Sequence[Model] | Split,
        *,
        devices: DevicesLike = "auto",
        seed: int = 0,
    ) -> None:
        if isinstance(stages, Split):
            named, edges = dict(stages.stages), edges_of(stages)
        else:
            named = named_stages(stages)
            edges = [Edge(source, target) for source, target in pairwise(named)]
        super().__init__(named, edges, outputs=list(named)[-1], devices=devices, seed=seed)
        if isinstance(stages, Split):
            self._paths = stages.paths

    @classmethod
    def _rebuilt(cls, models: Any, manifest: Mapping[str, Json], devices: DevicesLike) -> Self:
        """Return the chain of a manifest, with these models."""
        if callable(models) and not is_made(models):
            models = models()
        if isinstance(models, Split):
            return cls(models, devices=devices, seed=manifest["seed"])
        return cls(saving.made_models(models, manifest["nodes"]), devices=devices, seed=manifest["seed"])


def named_stages(stages: Mapping[str, Model] | Sequence[Model]) -> dict[str, Model]:
    """Return stages by name. Those of a list are named by their numbers."""
    given = (
        stages if isinstance(stages, Mapping) else {str(i): model for i, model in enumerate(list_models(stages))}
    )
    if not given:
        raise InputError("a chain needs at least one stage; got none.")
    return {str(name): model for name, model in given.items()}


def edges_of(split: Split) -> list[Edge]:
    """Return the edges between the stages of a split model, and from its inputs."""
    several = {link.source for link in split.links if link.output > 0}
    taking = {name: sum(link.target == name for link in split.links) for name in split.stages}
    edges = []
    for link in split.links:
        source = INPUT if link.source == "" else link.source
        output = f".{link.output}" if link.source in several else ""
        given = f".{link.input}" if taking[link.target] > 1 else ""
        edges.append(Edge(f"{source}{output}", f"{link.target}{given}"))
    return edges

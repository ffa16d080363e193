"""Chains: models that stand in a row, each taking what the one before gives."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Self

from modelfleet.errors import InputError
from modelfleet.frameworks.model_building import list_models
from modelfleet.graph.graph import Graph
from modelfleet.graph.placement import DevicesLike
from modelfleet.graph.topology import Edge
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
        self, stages: Mapping[str, Model] | Sequence[Model], *, devices: DevicesLike = "auto", seed: int = 0
    ) -> None:
        given = dict(stages) if isinstance(stages, Mapping) else list_models(stages)
        named = given if isinstance(given, dict) else {str(index): model for index, model in enumerate(given)}
        if not named:
            raise InputError("a chain needs at least one stage; got none.")
        names = list(named)
        edges = [Edge(source, target) for source, target in pairwise(names)]
        super().__init__(named, edges, outputs=names[-1], devices=devices, seed=seed)

    @classmethod
    def _rebuilt(cls, models: Mapping[str, Model], manifest: Mapping[str, Json], devices: DevicesLike) -> Self:
        """Return the chain of a manifest, with these models."""
        return cls(models, devices=devices, seed=manifest["seed"])

"""Structure of TensorFlow's own models. Their functions can't be compared, so each model equals only itself."""

from collections.abc import Sequence

from modelfleet.frameworks.structure import Opaque
from modelfleet.types import Model


def signature(model: Model) -> Opaque:
    """Return a model's structure, which is equal to no other model's."""
    return Opaque(model)


def difference(a: Opaque, b: Opaque) -> str | None:
    """Return why two models are not fused; None if they are the same model."""
    return None if a == b else "TensorFlow's own models run each by itself"


def trained_twice(models: Sequence[Model]) -> None:
    """Return None: none of these models is trained."""

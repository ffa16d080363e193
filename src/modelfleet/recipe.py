"""What `fleet.compile` was told."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from modelfleet.each import Each, spread


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a fleet's members are to be trained. Every hyperparameter is one value, or `each`."""

    optimizer: Any
    loss: Any = None
    objective: Callable[[Any, Any], Any] | None = None
    metrics: Sequence[Any] = ()
    clip_norm: Any = None
    precision: str = "float32"
    schedule: Any = None
    hyperparameters: Mapping[str, Any] | None = None

    def by_name(self, names: Sequence[str]) -> "Recipe":
        """The same with every `each` by member name, checked to have a value for all of `names`."""
        return self._mapped(lambda value, what: Each(dict(zip(names, spread(value, names, what), strict=True))))

    def only(self, names: Sequence[str]) -> "Recipe":
        """The same for some of the members; what has no value for one of them will say so."""
        kept = set(names)

        def narrow(value: Each, what: str) -> Each:
            assert isinstance(value.values, dict)
            return Each({name: own for name, own in value.values.items() if name in kept})

        return self._mapped(narrow)

    def _mapped(self, change: Callable[[Each, str], Each]) -> "Recipe":
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["hyperparameters"] = dict(self.hyperparameters or {})
        for group in (given, given["hyperparameters"]):
            for what, value in group.items():
                if isinstance(value, Each):
                    group[what] = change(value, what)
        return Recipe(**given)

"""What a framework's adapter and engine must have."""

from typing import TYPE_CHECKING

import pytest

from modelfleet.frameworks.engine import Engine

if TYPE_CHECKING:  # for the type checker: one process can't import them all
    from modelfleet.frameworks import jax, keras, tensorflow, torch
    from modelfleet.frameworks.adapter_protocol import Adapter

    ADAPTERS: list[Adapter] = [torch, jax, keras, tensorflow]


def test_an_engine_that_lacks_a_method_can_not_be_made() -> None:
    class Half(Engine):
        def clear_trouble(self) -> None:
            pass

    with pytest.raises(TypeError, match="scatter"):
        Half()  # type: ignore[abstract]

"""Random programs on JAX models: in a fleet == alone. `make fuzz` tries as many more as there is time for."""

from hypothesis import Phase, given, settings
from tests.fuzz.drawing import programs
from tests.fuzz.programs import Program
from tests.fuzz.running import check


@settings(max_examples=8, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
@given(programs("jax"))
def test_programs_give_what_flax_and_optax_give(program: Program) -> None:
    check(program)

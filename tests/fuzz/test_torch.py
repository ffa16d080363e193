"""Random programs on torch models: in a fleet == alone. `make fuzz` tries as many more as there is time for."""

from hypothesis import Phase, given, settings
from tests.fuzz.drawing import programs
from tests.fuzz.programs import Program
from tests.fuzz.running import check


@settings(max_examples=76, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
@given(programs("torch"))
def test_programs_give_what_plain_torch_gives(program: Program) -> None:
    check(program)

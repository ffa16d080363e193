"""From a step in Python to a flat graph of tensor operations, or to the reason why there is none."""

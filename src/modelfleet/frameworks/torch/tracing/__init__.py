"""From a step in Python to a graph of tensor operations."""

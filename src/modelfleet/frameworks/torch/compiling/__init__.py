"""Traced graphs, compiled in a second process while training continues."""

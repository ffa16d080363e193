"""Traced graphs, compiled in a second process while the training goes on."""

"""Fits in workers: the messages that cross, the worker's side, and the owner's view of remote lanes."""

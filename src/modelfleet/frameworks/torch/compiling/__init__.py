"""Traced graphs compiled beside the training."""

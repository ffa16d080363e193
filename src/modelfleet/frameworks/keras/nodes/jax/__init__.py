"""Keras nodes that train, on JAX."""

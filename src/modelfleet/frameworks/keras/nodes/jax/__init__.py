"""Keras nodes on JAX, where they train, too."""

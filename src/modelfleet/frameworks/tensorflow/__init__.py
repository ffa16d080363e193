"""TensorFlow's own models in fleets."""

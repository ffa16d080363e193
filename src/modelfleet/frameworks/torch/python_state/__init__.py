"""Python values that a model's code can read, and how to put them back."""

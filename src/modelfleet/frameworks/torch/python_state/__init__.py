"""Python values that a model's code can read besides its arguments: have they changed, and how to undo that."""

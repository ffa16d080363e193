"""Optimizers on stacked parameters, with hyperparameters of each member's own."""

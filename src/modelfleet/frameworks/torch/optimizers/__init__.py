"""Optimizers on stacked parameters, with numbers of each member's own."""

"""Rows of a batch on several devices, with the gradients summed."""

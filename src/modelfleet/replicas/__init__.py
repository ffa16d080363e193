"""Replicas: one model on every device, fed from a queue with the rows of many users."""

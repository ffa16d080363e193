"""Runs: the arguments of a verb, the feeds for it, and a lane's part in a fit."""

"""Runs: what a verb is asked to do, the feeds for it, and a lane's part in a fit."""

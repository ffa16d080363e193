"""Deciding what runs where: groups, lanes, and the plan that tells."""

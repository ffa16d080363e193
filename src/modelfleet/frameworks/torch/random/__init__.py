"""Random numbers of each member's own."""

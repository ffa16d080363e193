"""Random numbers of each member's own, whether it is fused with others or runs alone."""

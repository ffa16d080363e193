"""Models that work together: chains, graphs, and one model cut into stages."""

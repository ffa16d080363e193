"""Models that work together: chains, graphs and ensembles over several devices."""

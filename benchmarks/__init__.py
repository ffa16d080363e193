"""End-to-end `fit` throughput of modelfleet against its peers, as ratios measured in one run."""

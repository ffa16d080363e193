"""A fleet as one model: means, votes, medians and functions of its members' outputs."""

"""Many members as one: their stacked state, and the programs that step it."""

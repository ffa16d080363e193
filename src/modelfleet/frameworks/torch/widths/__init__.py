"""Members of unequal widths as one lane: padded with zeros to the widest, and computed so that nobody can tell."""

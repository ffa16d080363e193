"""Planning: deciding which lanes there are, where they run, and how they share their devices."""

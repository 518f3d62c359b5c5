"""DELTA: a few layers attend in full, and the others to what those found."""

"""Tactic's selection on a GPU."""

"""Tactic: as many tokens as hold a share of the attention."""

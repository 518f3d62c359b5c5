"""Attention and whole servers on a CPU."""

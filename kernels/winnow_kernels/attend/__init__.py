"""Attention over selections, and over everything."""

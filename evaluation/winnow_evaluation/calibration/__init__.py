"""Measuring a model once for what a server that chooses policies by itself goes by: a profile, and a report on it."""

"""QUOKA: the keys that score highest for the queries that resemble their mean least."""

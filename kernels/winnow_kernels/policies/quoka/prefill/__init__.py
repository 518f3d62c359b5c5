"""QUOKA's prefill on a GPU."""

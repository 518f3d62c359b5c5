"""Attention timed by itself on a GPU: kernels, indexes, layers, a prompt's prefill."""

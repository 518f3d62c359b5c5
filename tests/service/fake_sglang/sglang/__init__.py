"""Stands in for SGLang where a test is of ``winnow up`` and not of SGLang."""

"""Tests, laid out as the source roots are."""

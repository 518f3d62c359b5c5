"""Policies by name: presets, what operators define, defaults, and the bounds that a key may set on them."""

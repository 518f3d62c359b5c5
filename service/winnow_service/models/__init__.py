"""Models by name: what there is, where it lies, and how it gets there."""

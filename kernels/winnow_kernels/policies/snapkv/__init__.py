"""SnapKV: what the end of the prompt attends to."""

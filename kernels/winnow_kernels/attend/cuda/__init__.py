"""Attention to selections in CUDA C++: warps that wait for no other, for the shapes that most models have."""

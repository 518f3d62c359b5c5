"""Kernels in CUDA C++, for what Triton has no words for: shared counters, ballots, and loads that run ahead."""

"""The kernels of ``lowbit_top_p``."""

"""Selection in CUDA C++: each code is read once, and only what may be selected is written down."""

"""What clients write, and its bounds: what every policy is described with. Neither torch nor Triton is imported."""

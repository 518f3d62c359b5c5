"""Whole servers: what policies gain end to end, what the service costs, how tensor parallelism answers."""

"""Load on a running service: simulated people and programs that use it, and what they must not have to wait for."""

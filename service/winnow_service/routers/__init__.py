"""The service's routes, one module for each surface."""

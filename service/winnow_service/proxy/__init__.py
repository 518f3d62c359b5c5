"""The way of a request, from HTTP in to the answer out: docs/architecture.md has its steps, in their order."""

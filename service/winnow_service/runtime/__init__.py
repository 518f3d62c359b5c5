"""The runtime as the service sees it: asking it, knowing whether it answers, and what it serves."""

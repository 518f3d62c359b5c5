"""Runtimes as the service sees them: asking one, knowing whether it answers, and choosing between several."""

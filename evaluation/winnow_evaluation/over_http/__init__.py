"""``winnow eval``: puts the tasks to an OpenAI-compatible server, and reports accuracy, speed and what was read."""

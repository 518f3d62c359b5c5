"""Long-context accuracy tasks and the runner that puts them to an OpenAI-compatible server."""

"""StreamingLLM: the first tokens and the newest."""

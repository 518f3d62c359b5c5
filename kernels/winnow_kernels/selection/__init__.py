"""From scores to the tokens that are read."""

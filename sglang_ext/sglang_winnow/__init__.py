"""What a running SGLang server needs to serve Winnow policies."""

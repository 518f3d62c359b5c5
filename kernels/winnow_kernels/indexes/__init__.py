"""What selectors keep beside the KV cache to score tokens cheaply: it lives with KV pages, never with a request."""

"""``winnow up``: the runtime and the service as child processes that never outlive it."""

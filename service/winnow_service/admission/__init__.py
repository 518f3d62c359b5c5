"""Which requests are let through to the runtimes, and when: the queue before them, and the end of the service."""

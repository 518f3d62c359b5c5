"""The runtime as the service sees it: a client that asks it, and a monitor that knows whether it answers."""

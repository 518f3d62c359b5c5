"""The ``attention`` field: from a client's request into the runtime's, and from the runtime's answer to the client."""

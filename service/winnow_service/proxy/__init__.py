"""The way of a request, from HTTP in to the answer out.

The modules, in the order in which a request meets them:

- ``entrance``: it gets an id; when it has ended it is measured and logged.
- ``gate``: it is refused if the service is about to end, or its head is too long.
- ``openai_routes``, ``native_routes``: one function for each path.
- ``authorization``: whose key it has.
- ``forwarder``: the pipeline, which calls everything below.
- ``body``: its JSON, parsed once.
- ``choice``, with ``attention_field``: its policies.
- ``charge``, with ``estimate``: what it reserves of its key's limits, and what it is charged.
- ``client_leaving``: it is cancelled when its client leaves; ``incidents`` counts that, and failures of the runtime.
- ``upstream``, with ``headers``: it is sent to a runtime.
- ``generation``, with ``answer`` and ``reported_usage``: its answer is read, counted and rewritten.
- ``event_stream``: its answer is passed on as it comes.

Besides: ``request_facts`` holds what becomes known of it.
"""

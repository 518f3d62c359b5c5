"""The HTTP service in front of SGLang, and the ``winnow`` command line."""

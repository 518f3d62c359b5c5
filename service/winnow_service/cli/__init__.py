"""The ``winnow`` command line: one module for each command."""

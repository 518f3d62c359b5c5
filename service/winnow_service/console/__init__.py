"""The page at ``/console``: HTML, CSS and ES modules in ``page/``, served as they are."""

"""SparQ: the keys that score highest in the query's largest channels."""

"""Measuring a model, with transformers and outside of any server, for what its policies need to know in advance."""

"""Trains SmolLM2-135M-Instruct on to 32,768 tokens: data, network, adapter, loop, evaluation and model card."""

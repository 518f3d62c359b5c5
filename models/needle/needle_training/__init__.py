"""How the needle model was made: its tokenizer, its training data, its network and the training loop."""

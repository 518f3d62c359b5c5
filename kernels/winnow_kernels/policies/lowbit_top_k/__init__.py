"""The tokens that hold most of the attention, as codes of 2 bits a channel predict it."""

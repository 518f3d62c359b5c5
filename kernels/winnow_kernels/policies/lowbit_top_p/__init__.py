"""The fewest tokens that hold a share of the attention, as codes of 2 bits a channel predict it."""

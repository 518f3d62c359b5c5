"""How much one key may use: requests and tokens in any minute, and requests at once."""

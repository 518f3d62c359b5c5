"""How far each policy is from dense attention on the same text, and what it reads for it."""

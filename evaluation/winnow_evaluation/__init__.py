"""What measures a model: real text, and how close a policy stays to dense attention."""

"""What policies lose: records and tables of accuracy, and of the distance from dense attention."""

"""Dense attention."""

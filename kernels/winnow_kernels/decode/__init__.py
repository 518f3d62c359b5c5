"""What decode policies share."""

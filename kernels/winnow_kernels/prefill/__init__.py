"""What prefill policies share."""

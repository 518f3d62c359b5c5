"""Policies of attention, one folder each: parameters, torch reference, GPU launches and what the runtime must know."""

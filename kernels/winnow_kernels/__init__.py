"""Attention kernels, selectors and indexes: tensors in, tensors out."""

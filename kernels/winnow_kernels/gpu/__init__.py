"""The decode policies on a GPU, in Triton: nothing here waits for the device or has a shape that depends on data."""

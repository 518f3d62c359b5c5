"""The attention backend on CUDA: every policy in Triton, decode in CUDA graphs, dense batches left to SGLang's own."""

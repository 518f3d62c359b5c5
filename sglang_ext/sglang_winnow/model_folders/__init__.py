"""Making folders that SGLang loads: from a GGUF file, and from another folder and a low-rank adapter."""

"""What differs between the releases of SGLang that Winnow runs on, one module for each concern."""

"""Files in the GGUF format, and weights that stay packed as they are in them."""

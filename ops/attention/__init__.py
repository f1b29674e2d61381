"""Attention over the paged KV cache, and writing to it."""

"""A front end process: HTTP, tokenization, and its connections to the engine processes."""

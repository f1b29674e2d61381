"""The demo checkpoint: its data, its training and its files."""

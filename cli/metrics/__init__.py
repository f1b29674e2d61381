"""Reads /metrics of a running server, for `engine profile phases` and `engine top`."""

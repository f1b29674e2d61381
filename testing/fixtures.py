"""Pytest fixtures for plugin authors; pytest loads them by entry point."""

"""The supervisor process: starts, watches and restarts all others."""

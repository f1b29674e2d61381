"""The supervisor, the server's main process: `engine serve` runs `supervisor.main.serve`.

Binds the port, starts engine processes and front ends, passes accepted connections to the front ends, restarts what has
exited, and drains and stops everything on SIGTERM or SIGINT. The supervisor imports neither torch nor FastAPI.
"""

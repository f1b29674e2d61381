"""`python -m engine.server.front_end`, run by the supervisor: one front end."""

import sys

from engine.core.collector import paused

with paused(freeze=True):
    from engine.server.front_end.main import main

if __name__ == "__main__":
    sys.exit(main())

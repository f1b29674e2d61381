"""`python -m engine.server.engine_process`, run by the supervisor: one engine process."""

import sys

from engine.core.collector import paused

with paused(freeze=True):
    from engine.server.engine_process.main import main

if __name__ == "__main__":
    sys.exit(main())

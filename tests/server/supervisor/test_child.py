from __future__ import annotations

import asyncio
import sys

from engine.server.shared.messages import FrontEndToSupervisor, Shutdown
from engine.server.supervisor.child import Child

INTERRUPTS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGINT); os._exit(3)"


def test_sigint_is_blocked_in_a_starting_process() -> None:
    async def main() -> str:
        command = [sys.executable, "-S", "-c", INTERRUPTS_ITSELF]
        child = await Child[FrontEndToSupervisor].start(command, FrontEndToSupervisor, Shutdown())
        await asyncio.wait_for(child.wait(), 10)
        return child.exit_status

    assert asyncio.run(main()) == "exited with code 3"

from __future__ import annotations

import asyncio
import sys

from engine.server.shared.messages import FromFrontEnd, Shutdown
from engine.server.supervisor.child import Child

INTERRUPTS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGINT); os._exit(3)"


def test_ctrl_c_does_not_disturb_a_process_that_starts() -> None:
    async def main() -> str:
        command = [sys.executable, "-S", "-c", INTERRUPTS_ITSELF]
        child = await Child[FromFrontEnd].start(command, FromFrontEnd, Shutdown())
        await asyncio.wait_for(child.wait(), 10)
        return child.fate

    assert asyncio.run(main()) == "exited with code 3"

from __future__ import annotations

import asyncio
import sys
from typing import Any

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


def test_the_error_of_a_message_to_a_process_that_has_exited_is_read() -> None:
    """Asyncio logs an error that nothing has read, if the garbage collector frees it before its owner."""

    async def main() -> None:
        child = await Child[FrontEndToSupervisor].start([sys.executable, "-c", ""], FrontEndToSupervisor, Shutdown())
        closed: Any = child._writer.transport.get_protocol()._closed  # type: ignore[attr-defined]
        await child.wait()
        for _ in range(5):
            child.send(Shutdown())
            await asyncio.sleep(0)
        assert closed.done()
        assert not closed._log_traceback

    asyncio.run(main())

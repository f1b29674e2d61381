from __future__ import annotations

import asyncio
import threading

import pytest

from engine.server.http.text_threads import MAX_THREADS, TextThreads


def test_work_is_dropped_when_its_caller_is_cancelled_before_a_thread_is_free() -> None:
    async def main() -> list[int]:
        threads, release, done = TextThreads(), threading.Event(), list[int]()
        begun = [asyncio.ensure_future(threads.run(release.wait)) for _ in range(MAX_THREADS)]
        waiting = [asyncio.ensure_future(threads.run(lambda number=number: done.append(number))) for number in range(9)]
        await asyncio.sleep(0)
        for each in waiting[:8]:
            each.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*begun, *waiting, return_exceptions=True)
        return done

    assert asyncio.run(main()) == [8]


def test_an_error_of_the_work_reaches_the_caller() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(TextThreads().run(fail))

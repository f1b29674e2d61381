"""The limits of each API key: requests per minute and requests in progress."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine.core.config import ServerConfig
from engine.server.front_end.errors import ApiError
from engine.server.shared.limits_table import LimitsTable

BUSY_RETRY = 1
"""Retry-After in seconds of a request beyond server.concurrency_limit."""


class RequestLimits:
    """Admits or refuses the requests of each key."""

    def __init__(self, config: ServerConfig, table: LimitsTable | None) -> None:
        """table: None if there are no limits."""
        self._rate = config.rate_limit
        self._concurrency = config.concurrency_limit
        self._table = table

    @contextmanager
    def admit(self, key: int) -> Iterator[None]:
        """Count a request while it is answered; keys are numbered from 0. Raises ApiError with status 429."""
        table = self._table
        if table is None:
            yield
            return
        now = time.monotonic()
        if self._concurrency and table.active(key) >= self._concurrency:
            raise _too_many(f"{self._concurrency} requests in progress (server.concurrency_limit)", BUSY_RETRY)
        if self._rate and (wait := table.seconds_until(key, self._rate, now)) > 0:
            raise _too_many(f"{self._rate} requests per minute (server.rate_limit)", math.ceil(wait))
        table.begin(key, now)
        try:
            yield
        finally:
            table.end(key)


def _too_many(limit: str, seconds: int) -> ApiError:
    return ApiError(
        429,
        f"the limit is {limit} for this client; try again in {seconds} s",
        code="rate_limit_exceeded",
        headers={"retry-after": str(seconds)},
    )

"""Sets up the logs of a process that answers HTTP: its entries, and the access log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.logs import Process, configure
from engine.server.front_end import access_log
from engine.server.front_end.request_ids import current_fields

if TYPE_CHECKING:
    from engine.core.config import ServerConfig


def configure_logs(process: Process, config: ServerConfig) -> None:
    """Log as the settings say, with the IDs of the request that is being answered."""
    configure(process, style=config.log_format, level=config.log_level, context=current_fields)
    access_log.configure(config.access_log, structured=config.log_format == "json")

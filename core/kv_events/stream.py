"""The stream of events of one engine: what records them and what publishes them."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from engine.core.config.tree import KVEventsConfig
from engine.core.errors import ConfigError
from engine.core.extras import install_command
from engine.core.kv_events.recorder import Cleared, EventRecorder
from engine.core.kv_events.wire import BatchEncoder
from engine.core.types import CacheInfo

log = logging.getLogger(__name__)


class EventStream:
    """Publishes a batch for each `flush` with changes. The first batch says that the cache is empty."""

    def __init__(self, config: KVEventsConfig, cache: CacheInfo) -> None:
        """Raises ConfigError when pyzmq is missing or an endpoint cannot be used."""
        if find_spec("zmq") is None:
            raise ConfigError(f"kv_events.endpoint needs pyzmq; install it with `{install_command('server')}`")
        from engine.core.kv_events.publisher import Publisher

        if cache.states:
            log.warning(
                "kv_events.endpoint: layers with states reuse no prefixes, so there are no events but the first"
            )
        encoder = BatchEncoder(cache.kinds, cache.block_size, rank=config.rank, arrays=config.encoding == "array")
        self.recorder = EventRecorder(cache.block_size)
        """Observes the block manager."""
        self._publisher = Publisher(config, encoder)
        self._publisher.publish([Cleared()])

    @property
    def published(self) -> int:
        """Batches published so far, those dropped included."""
        return self._publisher.published

    @property
    def dropped(self) -> int:
        """Batches dropped because they came faster than they could be sent."""
        return self._publisher.dropped

    def flush(self) -> None:
        """Publish the changes since the last call, if there are any; never blocks."""
        changes = self.recorder.take()
        if changes:
            self._publisher.publish(changes)

    def close(self) -> None:
        """Publish what is left, and close the sockets."""
        self.flush()
        self._publisher.close()

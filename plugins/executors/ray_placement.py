"""Reserves room in a Ray cluster for all ranks together, and frees it."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.core.errors import ExecutorError
from engine.plugins.executors.ray_actor import RankActor

CONNECT_SECONDS = 10.0
"""Time for a cluster to answer at its address."""
MAX_CONCURRENT_CALLS = 8
"""Maximum number of concurrent calls of an actor: one waits for messages, two for steps; the rest is spare."""


class Placement:
    """A placement group of one bundle per rank, on as few nodes as possible; Ray reserves all bundles or none."""

    def __init__(self, address: str | None, bundle: Mapping[str, float], ranks: int, timeout: float) -> None:
        """Join or start a cluster and reserve room.

        address: as in Options of ray.py; bundle: resources per rank, by Ray's names (CPU, GPU); timeout: seconds to
        wait. Raises ExecutorError.
        """
        self._connected = _connect(address)
        self._bundle = bundle
        self._group: Any = None
        try:
            self._group = placement_group([dict(bundle)] * ranks, strategy="PACK")
            if not self._group.wait(timeout):
                raise ExecutorError(
                    f"Ray could not place {ranks} ranks of {_amounts(bundle)} each within {timeout:g} s (option "
                    f"placement_timeout); {_cluster(bundle)}; add nodes, end what else runs there, or use a lower --tp"
                )
        except BaseException:
            self.release()
            self.leave()
            raise

    def start(self, actor: type[RankActor], rank: int) -> Any:
        """Start an actor in the bundle of this rank. Ray never restarts it: the KV cache would be lost."""
        return (
            ray.remote(actor)
            .options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                max_restarts=0,
                max_concurrency=MAX_CONCURRENT_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=rank
                ),
            )
            .remote()
        )

    @property
    def alive(self) -> bool:
        """Whether this process still belongs to a cluster; if not, its actors and bundles are gone."""
        return bool(ray.is_initialized())

    def release(self) -> None:
        """Free the room, in which Ray kills running actors. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def leave(self) -> None:
        """Leave the cluster if this object joined it; a second call does nothing."""
        connected, self._connected = self._connected, False
        if connected:
            ray.shutdown()


def _connect(address: str | None) -> bool:
    """Join or start a cluster; return False if this process belongs to one already."""
    if ray.is_initialized():
        present = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", present):
            raise ExecutorError(
                f"this process is connected to Ray at {present} already, not at {address}; leave out the option address"
            )
        return False
    where = "Ray could not be started" if address in (None, "local") else f"Ray cannot be joined at {address}"
    try:
        url = urlsplit(f"//{address}")
        if url.hostname is not None and url.port is not None:  # Ray itself would try for minutes
            socket.create_connection((url.hostname, url.port), CONNECT_SECONDS).close()
        with _signals_kept():
            ray.init(address=address, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise ExecutorError(f"{where}: {error}; see the option address, RAY_ADDRESS and `ray status`") from error
    return True


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, kept)


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _cluster(bundle: Mapping[str, float]) -> str:
    """Describe how much of the bundle's resources the cluster has."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    each = [_amounts({name: node["Resources"].get(name, 0) for name in bundle}) for node in nodes]
    free = ray.available_resources()
    listed = ", ".join(f"{amounts} on {node['NodeManagerAddress']}" for amounts, node in zip(each, nodes, strict=True))
    return f"the cluster has {listed}, of which {_amounts({name: free.get(name, 0) for name in bundle})} are free"

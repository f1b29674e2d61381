"""Room in a Ray cluster: joined or started by Ray's own rules, reserved for all ranks together, and given back."""

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
"""What a cluster gets to answer at its address."""
CALLS = 8
"""At once, of an actor: those that wait for messages and for steps, and room for others."""


class Placement:
    """A placement group of one bundle a rank: on as few nodes as can be, and all or none."""

    def __init__(self, address: str | None, bundle: Mapping[str, float], ranks: int, timeout: float) -> None:
        """address: see ray.Options; bundle: what a rank takes, in Ray's names (CPU, GPU); timeout: seconds to wait.

        Raises ExecutorError.
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
        """An actor in the bundle of this rank, which Ray starts but never restarts: what it held would be lost."""
        return (
            ray.remote(actor)
            .options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                max_restarts=0,
                max_concurrency=CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=rank
                ),
            )
            .remote()
        )

    @property
    def alive(self) -> bool:
        """Whether this process still belongs to a cluster; what it had there has gone with it otherwise."""
        return bool(ray.is_initialized())

    def release(self) -> None:
        """Give the room back: Ray ends what still runs there. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def leave(self) -> None:
        """Leave the cluster, if this joined it; a second call does nothing."""
        connected, self._connected = self._connected, False
        if connected:
            ray.shutdown()


def _connect(address: str | None) -> bool:
    """Join a cluster, or start one; False: this process belongs to one already."""
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
    """Ray sets a handler of SIGTERM, which is the engine process's own business."""
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
    """What there is of what was asked for."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    each = [_amounts({name: node["Resources"].get(name, 0) for name in bundle}) for node in nodes]
    free = ray.available_resources()
    listed = ", ".join(f"{amounts} on {node['NodeManagerAddress']}" for amounts, node in zip(each, nodes, strict=True))
    return f"the cluster has {listed}, of which {_amounts({name: free.get(name, 0) for name in bundle})} are free"

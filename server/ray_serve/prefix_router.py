"""Ray Serve's router of calls to the engine replicas; Ray Serve makes an instance in each front end."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from engine.server.front_end.routing import MAX_INDEXED_BLOCKS
from engine.server.ray_serve.call_placement import CallPlacement
from engine.server.ray_serve.ray_link import EngineCall, TargetedCall


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Routes each EngineCall to the replica where it costs least, a TargetedCall to its replica, and others in turn."""

    def initialize_state(self, block_size: int, prefix_caching: bool, front_ends: int) -> None:
        """Called by Ray Serve with request_router_kwargs. block_size: tokens per block."""
        self._placement = CallPlacement(block_size)
        self._unknown_blocks = MAX_INDEXED_BLOCKS if prefix_caching else 0
        self._alone = front_ends == 1
        self._by_name: dict[str, RunningReplica] = {}
        self._turn = 0

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._update_placement()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._update_placement()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        match _argument(pending_request):
            case EngineCall() as call:
                names = self._placement.place(call, self._with_room(), self._num_calls())
                return [[self._by_name[name]] for name in names]
            case TargetedCall(replica=name) if name in self._by_name:
                return [[self._by_name[name]]]
        self._turn += 1
        count = len(candidate_replicas)
        return [[candidate_replicas[(self._turn + index) % count]] for index in range(count)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        call = _argument(pending_request)
        if isinstance(call, EngineCall) and call.replica != replica_id.unique_id:
            self._placement.move(call, replica_id.unique_id)  # the best replica had no room after all

    def _update_placement(self) -> None:
        self._by_name = {name.unique_id: replica for name, replica in self.curr_replicas.items()}
        self._placement.change_replicas(
            {name: replica.routing_stats.get("blocks", self._unknown_blocks) for name, replica in self._by_name.items()}
        )

    def _with_room(self) -> list[str]:
        return [replica.replica_id.unique_id for replica in self.select_available_replicas()]

    def _num_calls(self) -> dict[str, int]:
        """The calls on each replica, those of other front ends included; empty where there are no others."""
        if self._alone:
            return {}
        lengths = {name: self.replica_queue_len_cache.get(one.replica_id) for name, one in self._by_name.items()}
        return {name: length for name, length in lengths.items() if length is not None}


def _argument(pending: PendingRequest | None) -> object:
    """The first argument of a call."""
    return pending.args[0] if pending is not None and pending.args else None

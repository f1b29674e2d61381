"""Chooses the engine replica for each call, by the cost that front ends use on one machine (front_end/routing.py).

A call's argument says what the call costs now, so the load of a replica is the sum over the calls that this front end
has sent to the replica. Of the calls of other front ends only the number is known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from engine.server.front_end.routing import MAX_OUTPUT_COST, Router
from engine.server.ray_serve.ray_link import EngineCall


class CallPlacement:
    """The engine replicas by name, and the calls that one front end has sent to each."""

    def __init__(self, block_size: int) -> None:
        """block_size: tokens per block."""
        self._router = Router([], block_size)
        self._sent: dict[str, set[EngineCall]] = {}

    def change_replicas(self, num_blocks: Mapping[str, int]) -> None:
        """Choose among these replicas from now on. num_blocks: in the prefix cache of each replica."""
        names = sorted(num_blocks)  # all front ends break ties alike
        self._sent = {name: self._sent.get(name, set()) for name in names}
        self._router.change_replicas({name: num_blocks[name] for name in names})

    def place(self, call: EngineCall, with_room: Collection[str], num_calls: Mapping[str, int]) -> list[str]:
        """The replicas for a call, best first; empty if there are none. Counts the call for the best one.

        with_room: replicas that accept calls now. num_calls: calls of all front ends on each replica, where known.
        """
        loads = {name: self._load(name, num_calls.get(name, 0)) for name in self._sent}
        willing = loads.keys() - call.declined or set(loads)
        usable = willing & set(with_room) or willing
        if not usable:
            return []
        open_loads = [load if name in usable else None for name, load in loads.items()]
        placement = self._router.place([call.request], open_loads, call.choices)[0]
        best = list(loads)[placement.replica]
        call.prompt_cost, call.output_cost = placement.prompt_cost, placement.output_cost
        self.move(call, best)
        return [best, *sorted(usable - {best}, key=lambda name: loads[name])]

    def move(self, call: EngineCall, replica: str) -> None:
        """Count a call for the replica that the call is sent to, unless the replica has been removed meanwhile."""
        self._sent.get(call.replica, set()).discard(call)
        self._sent.get(replica, set()).add(call)
        call.replica = replica

    def _load(self, name: str, num_calls: int) -> float:
        """Load of a replica, tokens; also forgets the calls that have ended."""
        calls = self._sent[name] = {call for call in self._sent[name] if not call.ended}
        own = sum(call.load for call in calls)
        others = max(0, num_calls - len(calls))
        return own + others * (own / len(calls) if calls else MAX_OUTPUT_COST)

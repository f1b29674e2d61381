"""An actor without a model: fake_worker.py under Ray, whose nodes have this directory on their path."""

from __future__ import annotations

from fake_worker import FakeRunner

from engine.core.errors import EngineError
from engine.core.startup import Phases
from engine.plugins.executors.control_messages import Assignment
from engine.plugins.executors.ray_actor import RankActor


class FakeActor(RankActor):
    def make_runner(self, assignment: Assignment, phases: Phases) -> FakeRunner:
        return FakeRunner(assignment, phases)


class OtherVersion(RankActor):
    def begin(self, order: bytes) -> None:
        raise EngineError("a message could not be read")

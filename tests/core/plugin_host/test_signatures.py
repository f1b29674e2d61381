"""Signatures of a plugin's methods next to those of its contract."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from engine.core.attention.base import AttentionBackend
from engine.core.executors.base import Executor
from engine.core.models.base import Model
from engine.core.plugin_host.extension_points import EXTENSION_POINTS
from engine.core.plugin_host.load import load_plugins
from engine.core.plugin_host.signatures import wrong_signature
from engine.core.schedulers.policy import SchedulingPolicy
from engine.core.speculators.device import DeviceSpeculator

POINTS = {point.name: point for point in EXTENSION_POINTS}


class Order:
    """An object that can be called as a method of a policy, which Python does not pass to it."""

    def __call__(self, waiting: Any, now: Any) -> Any:
        return waiting


class Swapped:
    """A descriptor that is no function itself."""

    def __get__(self, policy: Any, kind: type) -> Any:
        return self if policy is None else Order()


def problem(point: str, contract: type, **members: Any) -> str | None:
    """What is said of a class that derives from a contract."""
    found = POINTS[point]
    return wrong_signature(found, type("Mine", (contract,), {"api": found.api, **members}))


@pytest.mark.parametrize(
    ("contract", "point", "members", "sentence"),
    [
        (
            SchedulingPolicy,
            "schedulers",
            {"order": lambda self, waiting: waiting},
            (
                "Mine.order takes (self, waiting): too many positional arguments;"
                " the contract is SchedulingPolicy.order(self, waiting, now)"
            ),
        ),
        (
            SchedulingPolicy,
            "schedulers",
            {"refuses": lambda cls: None},
            (
                "Mine.refuses takes (cls): missing a required argument: 'cls'; mark it with @classmethod;"
                " the contract is SchedulingPolicy.refuses(cls)"
            ),
        ),
        (
            SchedulingPolicy,
            "schedulers",
            {"__init__": lambda self: None},
            (
                "Mine.__init__ takes (self): too many positional arguments;"
                " the contract is SchedulingPolicy.__init__(self, options=None)"
            ),
        ),
        (
            AttentionBackend,
            "attention",
            {"plan": lambda self, batch, graph: None},
            (
                "Mine.plan takes (self, batch, graph): missing a required argument: 'graph';"
                " the contract is AttentionBackend.plan(self, batch, graph=None)"
            ),
        ),
        (
            DeviceSpeculator,
            "speculators",
            {"choose": lambda self: None},
            (
                "Mine.choose takes (self): too many positional arguments;"
                " the contract is DeviceSpeculator.choose(self, hidden)"
            ),
        ),
        (
            SchedulingPolicy,
            "schedulers",
            {"order": functools.partialmethod(lambda self, seed, waiting: waiting, 7)},
            "Mine.order takes (self, waiting): too many positional arguments",
        ),
        (
            SchedulingPolicy,
            "schedulers",
            {"victim": Order()},
            "Mine.victim takes (waiting, now): missing a required argument: 'now'; the contract is",
        ),
        (
            SchedulingPolicy,
            "schedulers",
            {"refuses": Order()},
            "Mine.refuses takes (waiting, now): missing a required argument: 'waiting'; the contract is",
        ),
        (
            SchedulingPolicy,
            "schedulers",
            {"refuses": property(lambda self: Order())},
            "Mine.refuses is <property object",
        ),
        (Executor, "executors", {"check": None}, "Mine.check is None, not a method; the contract is Executor.check"),
    ],
)
def test_method_is_named_with_its_contract_when_it_cannot_be_called_as_the_contract_says(
    contract: type, point: str, members: dict[str, Any], sentence: str
) -> None:
    assert str(problem(point, contract, **members)).startswith(sentence)


def test_a_coroutine_is_named_when_the_contract_has_a_plain_method() -> None:
    async def victim(self: Any, running: Any) -> Any:
        return running[0]

    assert "Mine.victim is a coroutine (async def)" in str(problem("schedulers", SchedulingPolicy, victim=victim))


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return call


def with_seed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, waiting: Any, now: Any) -> Any:
        return function(self, 7, waiting, now)

    return call


@pytest.mark.parametrize(
    "order",
    [
        lambda self, waiting, now: waiting,
        lambda self, queue, clock, verbose=False, *, seed=0: queue,
        lambda self, *arguments: arguments[0],
        lambda *arguments, **named: arguments[1],
        logged(lambda self, waiting, now: waiting),
        staticmethod(lambda waiting, now: waiting),
        classmethod(lambda cls, waiting, now: waiting),
        with_seed(lambda self, seed, waiting, now: waiting),
        functools.partialmethod(lambda self, seed, waiting, now: waiting, 7),
        functools.partial(lambda seed, waiting, now: waiting, 7),
        Order(),
        property(lambda self: Order()),
        Swapped(),
    ],
)
def test_nothing_is_said_of_a_method_that_takes_what_the_contract_passes(order: Any) -> None:
    assert problem("schedulers", SchedulingPolicy, order=order) is None


def test_nothing_is_said_of_a_constructor_that_needs_the_options_which_are_always_passed() -> None:
    assert problem("models", Model, __init__=lambda self, config, layers, options: None) is None


def test_nothing_is_said_of_a_class_for_an_older_version_of_the_contract() -> None:
    older = {"api": "1", "__init__": lambda self, config, parts, options: None}
    assert problem("executors", Executor, **older) is None


def test_nothing_is_said_of_a_built_in_plugin() -> None:
    found = {}
    for registry in load_plugins().registries.values():
        for one in registry:
            if one.name in ("fcfs", "torch", "none", "uniproc", "llama", "think", "llguidance", "ngram", "eagle"):
                found[one.name] = wrong_signature(registry.extension_point, one.load())
    assert len(found) == 9
    assert not any(found.values())

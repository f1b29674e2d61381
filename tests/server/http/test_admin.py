"""Routes of administration: who may use them, and what they answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

Serve = Callable[..., AbstractContextManager[Any]]

KEY = {"authorization": "Bearer admin-secret"}
PATH = "/reset_prefix_cache"


def test_admin_routes_are_off_without_an_admin_key(server: Any) -> None:
    for headers in ({}, KEY):
        response = httpx.post(f"{server.url}{PATH}", headers=headers, timeout=30)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_off")
        assert "--admin-api-key" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def admin(serve_fake: Serve) -> Iterator[Any]:
    """A server of two replicas with keys of both kinds."""
    with serve_fake(
        api_key=("user-secret",), admin_api_key=("admin-secret",), replicas=2, replica_restarts=0, rate_limit=1
    ) as server:
        yield server


def test_admin_routes_take_an_admin_key_and_no_other(admin: Any) -> None:
    with admin.client() as client:
        for headers in ({}, {"authorization": "Bearer user-secret"}, {"x-api-key": "user-secret"}):
            response = client.post(PATH, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            assert "admin key" in response.json()["error"]["message"]
        assert client.get("/v1/models", headers=KEY).status_code == 401
        for headers in (KEY, {"x-api-key": "admin-secret"}):  # without a limit of requests
            response = client.post(PATH, headers=headers)
            assert response.status_code == 200
            assert response.json() == {"replicas": [{"replica": n, "blocks_freed": 7} for n in range(2)]}


def test_admin_routes_address_one_replica_or_all(admin: Any) -> None:
    with admin.client(**KEY) as client:
        assert client.post(PATH, json={"replica": 1}).json() == {"replicas": [{"replica": 1, "blocks_freed": 7}]}
        for body, name in (({"replica": 2}, "replica"), ({"replicas": 1}, "replicas"), ({"replica": "x"}, "replica")):
            response = client.post(PATH, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        assert client.get(PATH).status_code == 405


@pytest.mark.parametrize(
    ("path", "name"), [("/start_profile", "steps"), ("/start_profile", "after"), ("/start_layer_profile", "steps")]
)
@pytest.mark.parametrize("steps", [-1, 10**30, 1.5, "1"])
def test_a_number_of_steps_is_refused_by_name_when_it_is_none(admin: Any, path: str, name: str, steps: Any) -> None:
    with admin.client(**KEY) as client:
        response = client.post(path, json={name: steps})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_a_call_to_a_replica_that_is_down_is_reported(admin: Any) -> None:
    os.kill(admin.engine_pids()[1], signal.SIGKILL)
    with admin.client(**KEY) as client:
        admin.until(lambda: client.post(PATH).status_code == 503)
        first, second = client.post(PATH).json()["replicas"]
    assert first == {"replica": 0, "blocks_freed": 7}
    assert "replica 1 of the engine is down" in second["error"]["message"]


def test_a_call_that_is_refused_is_reported(serve_fake: Serve) -> None:
    with serve_fake(admin_api_key=("admin-secret",), options={"busy": True}) as server:
        response = httpx.post(f"{server.url}{PATH}", headers=KEY, timeout=30)
        assert response.status_code == 409
        error = response.json()["error"]
        assert (error["message"], error["code"]) == ("another reset is in progress", "busy")

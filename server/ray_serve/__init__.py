"""The server as a Ray Serve application: engines on all machines of a Ray cluster, behind one address.

    serve run engine.server.ray_serve:build_app model=ORG/NAME serve.max_replicas=4

Ray Serve takes the place of the supervisor: it starts, watches, scales and replaces two kinds of replicas.

    front_end.py      deployment `front-end`: answers HTTP with the routes of ../http; has no model and no torch
    engine.py         deployment `engine`: supervises one engine process on the replica's own node

    options.py        the application's arguments
    application.py    the two deployments and how they scale
    call_placement.py chooses the engine replica for each call, by the cost that front ends use on one machine
    prefix_router.py  makes that choice Ray Serve's
    ray_link.py       a front end's link to the engines: one call of Ray per request
    cluster_state.py  what a front end knows of all engine replicas: health and statistics
    asgi.py           connections of Ray's HTTP proxy as the routes expect them
    messages.py       the messages between the two, as msgpack
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve import Application


def build_app(arguments: Mapping[str, object]) -> Application:
    """Build the application; `serve run` and the `import_path` of a Serve config file call this function.

    arguments: settings by their keys (`model.max_len`), `model` for model.path, `config` for a file of settings, and
    the fields of options.Options with `serve.` before them. Raises ConfigError.
    """
    from engine.core.errors import ConfigError
    from engine.core.extras import install_command

    missing = [name for name in ("ray", "grpc", "aiohttp") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"Ray Serve needs {', '.join(missing)}; install with `{install_command('ray-serve')}`")
    from engine.server.ray_serve.application import make_application
    from engine.server.ray_serve.options import read_arguments

    return make_application(*read_arguments(arguments))

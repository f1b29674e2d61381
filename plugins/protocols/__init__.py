"""Built-in conversation protocols, besides /v1/completions and /v1/chat/completions, which the server has itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.hooks import hookimpl

if TYPE_CHECKING:
    from engine.core.protocols import Routes


@hookimpl
def register_routes(routes: Routes) -> None:
    """Add the routes of the built-in protocols."""
    from engine.plugins.protocols.anthropic.routes import MessagesApi
    from engine.plugins.protocols.responses.handler import register

    register(routes)
    MessagesApi(routes).register()

"""Built-in executors."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_executors(register: Register) -> None:
    """Offer them."""
    register(
        "uniproc",
        lazy("engine.plugins.executors.uniproc:UniprocExecutor"),
        api="1",
        summary="one device, in the process of the engine",
        preference=10,
    )

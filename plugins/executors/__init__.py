"""Built-in executors."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_executors(register: Register) -> None:
    """Offer them."""
    register(
        "uniproc",
        lazy("engine.plugins.executors.uniproc:UniprocExecutor"),
        api="2",
        summary="one device, in the process of the engine",
        preference=10,
    )
    register(
        "multiproc",
        lazy("engine.plugins.executors.multiproc:MultiprocExecutor"),
        api="2",
        summary="one device, in a process of its own",
    )
    register(
        "tp",
        lazy("engine.plugins.executors.tp:TensorParallelExecutor"),
        api="2",
        summary="several devices, each with its share of every layer, in a process each",
        preference=5,
    )
    register(
        "ray",
        lazy("engine.plugins.executors.ray:RayExecutor"),
        api="2",
        summary="one device or several, of one node or several, as actors that Ray places",
    )

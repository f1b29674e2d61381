"""Built-in executors."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_executors(register: Register) -> None:
    """Register the built-in executors."""
    register(
        "uniproc",
        lazy("engine.plugins.executors.uniproc:UniprocExecutor"),
        api="2",
        summary="one device, in the engine's process",
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
        summary="several devices of one machine, each with its shard of every layer, in a process each",
        preference=5,
    )
    register(
        "ray",
        lazy("engine.plugins.executors.ray:RayExecutor"),
        api="2",
        summary="one or several devices, of one or several nodes, as actors that Ray places",
    )

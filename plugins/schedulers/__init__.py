"""Built-in scheduling policies."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_schedulers(register: Register) -> None:
    """Register the built-in policies."""
    register(
        "fcfs",
        lazy("engine.plugins.schedulers.fcfs:FirstComeFirstServed"),
        api="1",
        summary="first come, first served; preempts the latest",
        preference=10,
    )
    register(
        "priority",
        lazy("engine.plugins.schedulers.priority:Priority"),
        api="1",
        summary="lowest priority number first, arrival breaks ties; preempts the least urgent",
    )
    register(
        "multi_step",
        lazy("engine.plugins.schedulers.multi_step:MultiStep"),
        api="1",
        summary="first come, first served, several iterations per step; less host time, coarser streams",
    )

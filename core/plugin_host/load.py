"""Loads plugins one by one, each completely or not at all, and collects what they register."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any

import pluggy
from attrs import evolve

from engine.core import hooks
from engine.core.config.tree import AUTO, PluginsConfig
from engine.core.errors import PluginError, near_misses
from engine.core.plugin_host.extension_points import EXTENSION_POINTS, ExtensionPoint
from engine.core.plugin_host.faults import raise_interrupt
from engine.core.plugin_host.installed import HOME, OBJECT, PluginInfo, find_installed, info_of
from engine.core.plugin_host.registry import PluginFailure, Plugins, Registration, Registry

_log = logging.getLogger(__name__)

_SPECS = {name: value for name, value in vars(hooks).items() if hasattr(value, f"{hooks.PROJECT}_spec")}
"""The hooks by name, as core specifies them."""
_REGISTERING = frozenset(name for name in _SPECS if name.startswith("register_"))
"""Hooks that do nothing without their argument."""


def load_plugins(config: PluginsConfig | None = None, *, extra: Sequence[object] = (), quiet: bool = False) -> Plugins:
    """Load the plugins of all installed distributions, the built-ins first, then `extra`, modules or objects.

    A plugin that fails is logged as one warning, unless `quiet`, and kept in `failures`; selecting one of its
    implementations raises its error.

    Raises ConfigError for a name in [plugins] allow or deny that is no entry point, and PluginError for a plugin of
    `extra` that fails.
    """
    host = _Host()
    installed = find_installed(config or PluginsConfig())
    for point in installed.load:
        host.load_entry_point(point)
    for failure in host.failures if not quiet else ():
        _log.warning("%s", failure)
    for plugin in extra:
        name = getattr(plugin, "__name__", type(plugin).__name__)
        info = PluginInfo(name=name, entry_point=name, distribution=OBJECT, version="")
        failed = host.load(info, plugin)
        if failed is not None:
            raise PluginError(str(failed)) from failed.error
    failures = tuple(host.failures)
    registries = {
        point.name: Registry(point, host.registrations[point.name], failures, installed.excluded, installed.preferred)
        for point in EXTENSION_POINTS
    }
    return Plugins(
        registries=registries,
        loaded=tuple(host.loaded),
        failures=failures,
        manager=host.manager,
        managers=tuple(host.managers),
    )


class _Host:
    """Loads plugins one by one and collects their registrations and failures."""

    def __init__(self) -> None:
        self.manager = _manager()
        self.managers: list[pluggy.PluginManager] = []
        self.registrations: dict[str, dict[str, Registration[Any]]] = {point.name: {} for point in EXTENSION_POINTS}
        self.loaded: list[PluginInfo] = []
        self.failures: list[PluginFailure] = []

    def load_entry_point(self, point: EntryPoint) -> None:
        """Load the plugin, or each of the modules, that an entry point names; keep failures."""
        info = info_of(point)
        try:
            found = point.load()
        except BaseException as error:
            raise_interrupt(error)
            self.failures.append(PluginFailure(plugin=info, error=error))
            return
        members = [(info, found)]
        if isinstance(found, tuple):
            members = [(evolve(info, name=f"{point.name}:{path}"), path) for path in found]
        for member, plugin in members:
            failure = self.load(member, plugin)
            if failure is not None:
                self.failures.append(failure)

    def load(self, info: PluginInfo, plugin: object) -> PluginFailure | None:
        """Load one plugin (a module, a module's name or an object) completely, or register nothing and return why."""
        staged: list[Registration[Any]] = []
        claims: list[tuple[str, str]] = []
        try:
            if isinstance(plugin, str):
                plugin = import_module(plugin)
            # A manager for this plugin alone: a failure leaves nothing to undo.
            trial = _manager()
            _check_hooks(trial, plugin, info)
            trial.register(plugin, name=info.name)
            for extension_point in EXTENSION_POINTS:
                register = self._register(extension_point, info, staged, claims)
                returned = getattr(trial.hook, extension_point.hook)(register=register)
                if returned:
                    raise PluginError(
                        f"{info} returns {returned[0]!r} from {extension_point.hook}(), which ignores it; call "
                        "register(name, loader, api=..., summary=...) in it once for each implementation"
                    )
            self.manager.register(plugin, name=f"{info.distribution}/{info.name}/{len(self.loaded)}")
        except BaseException as error:
            raise_interrupt(error)
            return PluginFailure(plugin=info, error=error, claims=tuple(claims))
        for one in staged:
            self.registrations[one.extension_point.name][one.name] = one
        self.loaded.append(info)
        self.managers.append(trial)
        return None

    def _register(
        self,
        point: ExtensionPoint,
        info: PluginInfo,
        staged: list[Registration[Any]],
        claims: list[tuple[str, str]],
    ) -> hooks.Register:
        """The callback of a register hook; appends each offer to `staged`."""

        def register(*arguments: Any, **named: Any) -> None:
            try:
                inspect.signature(offer).bind(*arguments, **named)
            except TypeError as error:
                raise PluginError(
                    f"{info} calls register() of {point.hook}() with other arguments: {error}; write it as "
                    f'register("name", loader, api="{point.api}", summary="one line")'
                ) from error
            offer(*arguments, **named)

        def offer(
            name: str,
            loader: Callable[[], type],
            *,
            api: str,
            summary: str,
            preference: int = 0,
            fallback: bool = False,
        ) -> None:
            what = f"{info} offers {point.section} {name!r}"
            claims.append((point.name, name))
            if not isinstance(name, str) or not name or name == AUTO or "," in name:
                raise PluginError(f"{what}; a name is a non-empty string other than {AUTO}, without a comma")
            if not isinstance(api, str):
                raise PluginError(f"{what} with api = {api!r}; give the version as text, as api={point.api!r}")
            if api not in point.accepted_apis:
                raise PluginError(
                    f"{what} for version {api!r} of the {point.name} contract, but this "
                    f"engine has {point.versions}; install a version of {info.distribution} made for it"
                )
            if not callable(loader) or isinstance(loader, type):
                raise PluginError(
                    f"{what} with a loader that is not a function: {loader!r}; "
                    'give a function that returns the class, as `lambda: Class` or `lazy("module:Class")`'
                )
            if not isinstance(summary, str):
                raise PluginError(f"{what} with the summary {summary!r}; give one line of text")
            if type(preference) is not int or preference < 0:
                raise PluginError(
                    f"{what} with the preference {preference!r}; give a whole number: 0 to be used only when named, 1 "
                    f"or more to be considered by {AUTO}"
                )
            if any(one.extension_point == point and one.name == name for one in staged):
                raise PluginError(f"{what} twice; give each its own name")
            rival = self.registrations[point.name].get(name)
            if rival is not None:
                raise PluginError(
                    f"two plugins offer {point.section} {name!r}: {rival.plugin.provenance} (entry point "
                    f"{rival.plugin.entry_point!r}) and {info.provenance} (entry point {info.entry_point!r}); "
                    f"{_way_out(rival.plugin, info)}"
                )
            staged.append(
                Registration(
                    extension_point=point,
                    name=name,
                    loader=loader,
                    api=api,
                    summary=summary,
                    preference=preference,
                    plugin=info,
                    fallback=fallback,
                )
            )

        return register


def _way_out(first: PluginInfo, second: PluginInfo) -> str:
    """Advice where two plugins offer one name. (Denying an entry point denies every entry point of that name.)"""
    if second.distribution == OBJECT:
        return "give what you pass in another name"
    if first.distribution == second.distribution:
        return "give one of them another name"
    if first.distribution == HOME:
        return (
            f"give that of {second.distribution} another name, or put {second.entry_point!r} into [plugins] deny to do "
            "without it"
        )
    if first.entry_point == second.entry_point:
        return "uninstall one of the distributions"
    return "put one of the entry points into [plugins] deny"


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    return manager


def _check_hooks(manager: pluggy.PluginManager, plugin: object, info: PluginInfo) -> None:
    """Raise PluginError for a hook that would not be called, or not with the arguments that it has; and for none."""
    hook_names = f"the hooks are {', '.join(sorted(_SPECS))}"
    marked = {}
    for name in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is not None:
            marked[name] = options
    hook_of = {name: options.get("specname") or name for name, options in marked.items()}
    for name in sorted(_SPECS.keys() - hook_of.keys() - set(hook_of.values())):
        member = getattr(plugin, name, None)
        imported = isinstance(plugin, types.ModuleType) and getattr(member, "__module__", None) != plugin.__name__
        if inspect.isroutine(member) and not imported:
            raise PluginError(
                f"{info} has a function {name}() that is not marked, so it would not be called; mark it with "
                "@hookimpl of engine.core.hooks, or give it another name"
            )
    for name, hook in hook_of.items():
        if hook not in _SPECS:
            if marked[name].get("optionalhook"):
                continue
            raise PluginError(f"{info}: there is no hook {hook!r}; {near_misses(hook, _SPECS)}")
        wanted = list(inspect.signature(_SPECS[hook]).parameters)
        found = _arguments(getattr(plugin, name))
        observes = hook not in _REGISTERING and set(found) <= set(wanted)
        if found != wanted and not observes:
            raise PluginError(
                f"{info} has the hook {name}({', '.join(found)}), which is called with other arguments; write it as "
                f"{name}({', '.join(wanted)})"
            )
    if not marked:
        kind = "a module" if isinstance(plugin, types.ModuleType) else "an object"
        raise PluginError(
            f"{info} is {kind} without hooks; mark its functions with engine.core.hooks.hookimpl ({hook_names})"
        )


def _arguments(hook: Callable[..., Any]) -> list[str]:
    """The arguments that pluggy passes to a hook: by name, those without a default."""
    parameters = inspect.signature(hook).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [one.name for one in parameters if one.kind in kinds and one.default is inspect.Parameter.empty]

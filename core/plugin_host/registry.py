"""Finds and loads plugins, collects what they register, and records the distribution of each."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pluggy
from attrs import evolve, field, frozen

from engine.core import hooks
from engine.core.config.tree import AUTO, PluginsConfig
from engine.core.errors import PluginError, near_misses
from engine.core.plugin_host.extension_points import EXTENSION_POINTS, ExtensionPoint
from engine.core.plugin_host.faults import raise_interrupt
from engine.core.plugin_host.installed import (
    HOME,
    OBJECT,
    Excluded,
    PluginInfo,
    describe_plugin,
    find_installed,
    info_of,
    normalized,
    ways_in,
)

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.executors.base import Executor
    from engine.core.grammars.base import GrammarBackend
    from engine.core.models.base import Model
    from engine.core.parsers.base import Parser
    from engine.core.quant.base import QuantMethod
    from engine.core.schedulers.policy import SchedulingPolicy
    from engine.core.speculators.base import Speculator
    from engine.core.speculators.device import DeviceSpeculator

T = TypeVar("T")
Manifest = tuple[tuple[str, str, str], ...]
"""(plugin, distribution, version) of each loaded plugin, in the order of loading."""

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class PluginFailure:
    """A plugin that failed to load; none of its implementations is registered."""

    plugin: PluginInfo
    error: BaseException
    claims: tuple[tuple[str, str], ...] = ()
    """(extension point, name) of each implementation that it registered or tried to register."""

    def __str__(self) -> str:
        if isinstance(self.error, PluginError):
            return str(self.error)
        return f"{self.plugin} could not be loaded: {type(self.error).__name__}: {self.error}"


@frozen(kw_only=True)
class Registration(Generic[T]):
    """One implementation, not yet imported."""

    extension_point: ExtensionPoint
    name: str
    loader: Callable[[], type] = field(repr=False)
    api: str
    summary: str
    preference: int
    plugin: PluginInfo
    fallback: bool = False

    @property
    def distribution(self) -> str:
        """Name of the plugin's distribution."""
        return self.plugin.distribution

    @property
    def version(self) -> str:
        """Version of the plugin's distribution."""
        return self.plugin.version

    def __str__(self) -> str:
        return describe_plugin(self.extension_point.section, self.name, self.plugin.provenance)

    def load(self) -> type[T]:
        """Import the class. Raises PluginError if the import fails or the class breaks the contract."""
        try:
            found = self.loader()
        except BaseException as error:
            raise_interrupt(error)
            raise PluginError(f"{self} could not be imported: {type(error).__name__}: {error}") from error
        self.extension_point.check(found, str(self))
        return found


@frozen
class Registry(Generic[T]):
    """All implementations of one extension point."""

    extension_point: ExtensionPoint
    registrations: Mapping[str, Registration[T]]
    """By name, in the order of loading."""
    failures: tuple[PluginFailure, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    preferred: frozenset[str] = frozenset()
    """Distributions of third parties whose preferences count as those of built-in plugins do, normalized."""

    @property
    def contract(self) -> type[T]:
        """The abstract class that every implementation derives from."""
        return self.extension_point.contract

    def names(self) -> tuple[str, ...]:
        """Names of all implementations, in the order of loading."""
        return tuple(self.registrations)

    def __iter__(self) -> Iterator[Registration[T]]:
        return iter(self.registrations.values())

    def candidates(self) -> tuple[Registration[T], ...]:
        """What "auto" considers: the most preferred first, equals in the order of loading.

        To install a plugin activates nothing: those of third parties come last, unless [plugins] prefer names their
        distribution or they were passed in from Python. Fallbacks come after all others.
        """
        return tuple(
            sorted(
                (one for one in self if one.preference > 0),
                key=lambda one: (one.fallback, self._comes_last(one), -one.preference),
            )
        )

    def _comes_last(self, one: Registration[T]) -> bool:
        return one.distribution not in (HOME, OBJECT) and normalized(one.distribution) not in self.preferred

    def get(self, name: str) -> Registration[T]:
        """The implementation of this name.

        Raises PluginError for an unknown name (listing the known ones), and for a name offered by a broken plugin or by
        two plugins (with the cause chained).
        """
        for failure in self.failures:
            if (self.extension_point.name, name) in failure.claims or (
                name == failure.plugin.entry_point and name not in self.registrations
            ):
                section = self.extension_point.section
                raise PluginError(f"{section} {name!r} is not available: {failure}") from failure.error
        if name in self.registrations:
            return self.registrations[name]
        way_in = ways_in(self.excluded, name)
        message = f"there is no {self.extension_point.section} plugin {name!r}; {near_misses(name, self.names())}"
        message += f"; {way_in}" if way_in else ""
        if self.failures:
            message += "".join(f"; {failure}" for failure in self.failures)
            raise PluginError(message) from self.failures[0].error
        raise PluginError(message)


@frozen(kw_only=True)
class Plugins:
    """All plugins of one process."""

    registries: Mapping[str, Registry[Any]]
    """By name of the extension point."""
    loaded: tuple[PluginInfo, ...]
    failures: tuple[PluginFailure, ...]
    manager: pluggy.PluginManager = field(repr=False)
    managers: tuple[pluggy.PluginManager, ...] = field(repr=False)
    """One for each plugin in `loaded`, in the same order."""

    def notify(self, hook: str, **arguments: object) -> None:
        """Call a hook that only observes, of all plugins, the last loaded first. What a plugin raises is logged."""
        for plugin, manager in reversed(list(zip(self.loaded, self.managers, strict=True))):
            try:
                getattr(manager.hook, hook)(**arguments)
            except BaseException as error:
                raise_interrupt(error)
                _log.exception("%s failed in %s(), which only observes; the engine goes on", plugin, hook)

    @property
    def hook(self) -> pluggy.HookRelay:
        """All plugins' implementations of each hook."""
        return self.manager.hook

    @property
    def seams(self) -> Mapping[str, Registry[Any]]:
        """`registries`, by its name in 0.1."""
        return self.registries

    @property
    def attention(self) -> Registry[AttentionBackend[Any, Any]]:
        """Attention backends."""
        return self.registries["attention"]

    @property
    def quant(self) -> Registry[QuantMethod[Any]]:
        """Quantization methods."""
        return self.registries["quant"]

    @property
    def schedulers(self) -> Registry[SchedulingPolicy[Any]]:
        """Scheduling policies."""
        return self.registries["schedulers"]

    @property
    def executors(self) -> Registry[Executor]:
        """Executors."""
        return self.registries["executors"]

    @property
    def models(self) -> Registry[Model]:
        """Architectures."""
        return self.registries["models"]

    @property
    def parsers(self) -> Registry[Parser[Any]]:
        """Output parsers."""
        return self.registries["parsers"]

    @property
    def grammars(self) -> Registry[GrammarBackend[Any]]:
        """Grammar backends."""
        return self.registries["grammars"]

    @property
    def speculators(self) -> Registry[Speculator[Any] | DeviceSpeculator[Any]]:
        """Speculators, on the host and on the device."""
        return self.registries["speculators"]

    def manifest(self) -> Manifest:
        """The loaded plugins, as plain data for another process to `verify`."""
        return tuple((plugin.name, plugin.distribution, plugin.version) for plugin in self.loaded)

    def verify(self, manifest: Iterable[Sequence[str]]) -> None:
        """Raise PluginError unless this process has loaded exactly the plugins in another process's `manifest`."""
        theirs = [" ".join(entry) for entry in manifest]
        ours = [" ".join(entry) for entry in self.manifest()]
        if ours == theirs:
            return
        lacking = ", ".join(entry for entry in theirs if entry not in ours)
        extra = ", ".join(entry for entry in ours if entry not in theirs)
        difference = [f"lacks {lacking}"] * bool(lacking) + [f"has in addition {extra}"] * bool(extra)
        raise PluginError(
            f"this process {' and '.join(difference) or 'loaded the plugins in another order'}; all processes of one "
            "engine must load the same plugins: start them in the same Python environment"
        )


def load_plugins(config: PluginsConfig | None = None, *, extra: Sequence[object] = (), quiet: bool = False) -> Plugins:
    """Load the plugins of all installed distributions, the built-ins first, then `extra`, modules or objects.

    A plugin that fails is logged as one warning, unless `quiet`, and kept in `failures`; selecting an implementation of
    it raises its error. Raises ConfigError for a name in [plugins] allow or deny that is no entry point, and
    PluginError for a plugin of `extra` that fails.
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
        """Load one plugin (a module, a module's name or an object) completely, or leave no trace and return why."""
        staged: list[Registration[Any]] = []
        claims: list[tuple[str, str]] = []
        try:
            if isinstance(plugin, str):
                plugin = import_module(plugin)
            # A manager for this plugin alone: a failure leaves nothing to undo.
            trial = _manager()
            trial.register(plugin, name=info.name)
            _check_hooks(trial, plugin, info)
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

        def register(
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
    """What helps where two plugins offer one name; to deny an entry point denies all that have its name."""
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
    known = sorted(name for name, value in vars(hooks).items() if hasattr(value, f"{hooks.PROJECT}_spec"))
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"{info}: {error}; the hooks are {', '.join(known)}") from error
    if not manager.get_hookcallers(plugin):
        kind = "a module" if isinstance(plugin, types.ModuleType) else "an object"
        raise PluginError(
            f"{info} is {kind} without hooks; mark its functions with engine.core.hooks.hookimpl "
            f"(the hooks are {', '.join(known)})"
        )

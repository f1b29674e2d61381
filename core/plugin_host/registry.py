"""The plugin host: finds plugins, lets each register its implementations, and keeps where everything came from."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pluggy
from attrs import evolve, field, frozen

from engine.core import hooks
from engine.core.config.tree import AUTO, PluginsConfig
from engine.core.errors import ConfigError, PluginError, near_misses
from engine.core.plugin_host.extension_points import EXTENSION_POINTS, ExtensionPoint
from engine.core.plugin_host.faults import blame

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.executors.base import Executor
    from engine.core.models.base import Model
    from engine.core.quant.base import QuantMethod
    from engine.core.schedulers.policy import SchedulingPolicy

T = TypeVar("T")
GROUP = "engine"
"""Entry point group of plugins."""
HOME = "pluggable-llm-engine"
"""The distribution that core itself belongs to; its entry points are the built-ins."""
OBJECT = "object"
"""What stands for the distribution of a plugin passed in from Python."""
Manifest = tuple[tuple[str, str, str], ...]
"""(plugin, distribution, version) of each plugin loaded, in the order of loading."""

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class PluginInfo:
    """One plugin: a module or object with hooks."""

    name: str
    """Its entry point; for a member of a pack, "entry point:module"."""
    entry_point: str
    distribution: str
    """"object" for one passed in from Python."""
    version: str

    @property
    def provenance(self) -> str:
        """Distribution and version, as people read them."""
        return f"{self.distribution} {self.version}".strip()

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.provenance}"


@frozen(kw_only=True)
class PluginFailure:
    """A plugin that could not be loaded. Nothing of it is registered."""

    plugin: PluginInfo
    error: BaseException
    claims: tuple[tuple[str, str], ...] = ()
    """(seam, name) of what it had registered, or tried to, before it failed."""

    def __str__(self) -> str:
        if isinstance(self.error, PluginError):
            return str(self.error)
        return f"{self.plugin} could not be loaded: {type(self.error).__name__}: {self.error}"


@frozen(kw_only=True)
class Registration(Generic[T]):
    """One implementation, not yet imported."""

    seam: ExtensionPoint
    name: str
    loader: Callable[[], type] = field(repr=False)
    api: str
    summary: str
    preference: int
    plugin: PluginInfo

    @property
    def distribution(self) -> str:
        """The distribution it comes from."""
        return self.plugin.distribution

    @property
    def version(self) -> str:
        """That distribution's version."""
        return self.plugin.version

    def __str__(self) -> str:
        return f"{self.seam.section} {self.name!r} of {self.plugin.provenance}"

    def load(self) -> type[T]:
        """Import the class. Raises PluginError if that fails or the class breaks the seam's contract."""
        try:
            found = self.loader()
        except (Exception, SystemExit) as error:
            raise PluginError(f"{self} could not be imported: {type(error).__name__}: {error}") from error
        self.seam.check(found, str(self))
        return found


@frozen
class Registry(Generic[T]):
    """What one seam has to choose from."""

    spec: ExtensionPoint
    registrations: Mapping[str, Registration[T]]
    """By name, in the order of loading."""
    failures: tuple[PluginFailure, ...] = ()

    @property
    def seam(self) -> str:
        """Name of the seam."""
        return self.spec.name

    @property
    def contract(self) -> type[T]:
        """The abstract class that every implementation derives from."""
        return self.spec.contract

    def names(self) -> tuple[str, ...]:
        """All names, in the order of loading."""
        return tuple(self.registrations)

    def __iter__(self) -> Iterator[Registration[T]]:
        return iter(self.registrations.values())

    def candidates(self) -> tuple[Registration[T], ...]:
        """What "auto" considers: the most preferred first, in the order of loading among equals."""
        return tuple(sorted((one for one in self if one.preference > 0), key=lambda one: -one.preference))

    def get(self, name: str) -> Registration[T]:
        """The implementation of this name.

        Raises PluginError for a name nobody offers (with the names there are) and for one that a broken plugin offers
        or that two plugins offer (with the cause chained).
        """
        for failure in self.failures:
            if (self.seam, name) in failure.claims or (
                name == failure.plugin.entry_point and name not in self.registrations
            ):
                raise PluginError(f"{self.spec.section} {name!r} is not available: {failure}") from failure.error
        if name in self.registrations:
            return self.registrations[name]
        message = f"there is no {self.spec.section} plugin {name!r}; {near_misses(name, self.names())}"
        if self.failures:
            message += "".join(f"; {failure}" for failure in self.failures)
            raise PluginError(message) from self.failures[0].error
        raise PluginError(message)


@frozen(kw_only=True)
class Plugins:
    """All plugins of one process."""

    seams: Mapping[str, Registry[Any]]
    loaded: tuple[PluginInfo, ...]
    failures: tuple[PluginFailure, ...]
    manager: pluggy.PluginManager = field(repr=False)
    managers: tuple[pluggy.PluginManager, ...] = field(repr=False)
    """As `loaded`, of each plugin by itself."""

    def call(self, hook: str, **arguments: object) -> None:
        """Call a hook of all plugins, the last loaded first. Raises PluginFaultError, naming the one that fails."""
        for plugin, manager in reversed(list(zip(self.loaded, self.managers, strict=True))):
            with blame(str(plugin), f"{hook}()"):
                getattr(manager.hook, hook)(**arguments)

    @property
    def hook(self) -> pluggy.HookRelay:
        """All plugins' implementations of each hook."""
        return self.manager.hook

    @property
    def attention(self) -> Registry[AttentionBackend[Any, Any]]:
        """Attention backends."""
        return self.seams["attention"]

    @property
    def quant(self) -> Registry[QuantMethod[Any]]:
        """Quantization methods."""
        return self.seams["quant"]

    @property
    def schedulers(self) -> Registry[SchedulingPolicy[Any]]:
        """Scheduling policies."""
        return self.seams["schedulers"]

    @property
    def executors(self) -> Registry[Executor]:
        """Executors."""
        return self.seams["executors"]

    @property
    def models(self) -> Registry[Model]:
        """Architectures."""
        return self.seams["models"]

    def manifest(self) -> Manifest:
        """What is loaded, as plain data that another process can `verify`."""
        return tuple((plugin.name, plugin.distribution, plugin.version) for plugin in self.loaded)

    def verify(self, manifest: Iterable[Sequence[str]]) -> None:
        """Raise PluginError unless this process has loaded just what `manifest` of another process lists."""
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


def load_plugins(config: PluginsConfig | None = None, *, extra: Sequence[object] = ()) -> Plugins:
    """Load the plugins of all installed distributions, the built-ins first, then `extra`, modules or objects.

    A plugin that fails is logged as one warning and kept in `failures`; selecting what it offers raises its error.
    Raises ConfigError for a name in [plugins] allow or deny that is no entry point, and PluginError for a plugin of
    `extra` that fails.
    """
    host = _Host()
    for point in _entry_points(config or PluginsConfig()):
        host.load_entry_point(point)
    for failure in host.failures:
        _log.warning("%s", failure)
    for plugin in extra:
        name = getattr(plugin, "__name__", type(plugin).__name__)
        info = PluginInfo(name=name, entry_point=name, distribution=OBJECT, version="")
        failed = host.load(info, plugin)
        if failed is not None:
            raise PluginError(str(failed)) from failed.error
    failures = tuple(host.failures)
    seams = {seam.name: Registry(seam, host.registrations[seam.name], failures) for seam in EXTENSION_POINTS}
    return Plugins(
        seams=seams,
        loaded=tuple(host.loaded),
        failures=failures,
        manager=host.manager,
        managers=tuple(host.managers),
    )


class _Host:
    """Plugins being loaded."""

    def __init__(self) -> None:
        self.manager = _manager()
        self.managers: list[pluggy.PluginManager] = []
        self.registrations: dict[str, dict[str, Registration[Any]]] = {seam.name: {} for seam in EXTENSION_POINTS}
        self.loaded: list[PluginInfo] = []
        self.failures: list[PluginFailure] = []

    def load_entry_point(self, point: EntryPoint) -> None:
        """Load the plugin, or each module of the pack, that an entry point leads to; failures are kept."""
        distribution, version = _provenance(point)
        info = PluginInfo(name=point.name, entry_point=point.name, distribution=distribution, version=version)
        try:
            found = point.load()
        except (Exception, SystemExit) as error:
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
        """Load one plugin, a module or its name or another object, whole; or nothing of it."""
        staged: list[Registration[Any]] = []
        claims: list[tuple[str, str]] = []
        try:
            if isinstance(plugin, str):
                plugin = import_module(plugin)
            # A manager for this plugin alone: whatever goes wrong in it, nothing has to be undone.
            trial = _manager()
            trial.register(plugin, name=info.name)
            _check_hooks(trial, plugin, info)
            for seam in EXTENSION_POINTS:
                returned = getattr(trial.hook, seam.hook)(register=self._register(seam, info, staged, claims))
                if returned:
                    raise PluginError(
                        f"{info} returns {returned[0]!r} from {seam.hook}(), which is read by nobody; call "
                        "register(name, loader, api=..., summary=...) in it once for each implementation"
                    )
            self.manager.register(plugin, name=f"{info.distribution}/{info.name}/{len(self.loaded)}")
        except (Exception, SystemExit) as error:
            return PluginFailure(plugin=info, error=error, claims=tuple(claims))
        for one in staged:
            self.registrations[one.seam.name][one.name] = one
        self.loaded.append(info)
        self.managers.append(trial)
        return None

    def _register(
        self, seam: ExtensionPoint, info: PluginInfo, staged: list[Registration[Any]], claims: list[tuple[str, str]]
    ) -> hooks.Register:
        """The callback handed to a register hook; it notes what is offered in `staged`."""

        def register(name: str, loader: Callable[[], type], *, api: str, summary: str, preference: int = 0) -> None:
            what = f"{info} offers {seam.section} {name!r}"
            claims.append((seam.name, name))
            if not isinstance(name, str) or not name or name == AUTO or "," in name:
                raise PluginError(f"{what}; a name is a non-empty string other than {AUTO}, without a comma")
            if not isinstance(api, str):
                raise PluginError(f"{what} with api = {api!r}; give the version as text, as api={seam.api!r}")
            if api not in seam.accepted_apis:
                raise PluginError(
                    f"{what} for version {api!r} of the {seam.name} contract, but this "
                    f"engine has {seam.versions}; install a version of {info.distribution} made for it"
                )
            if not callable(loader) or isinstance(loader, type):
                raise PluginError(
                    f"{what} with a loader that is no function: {loader!r}; give one that returns the class, as "
                    '`lambda: Class` or `lazy("module:Class")`'
                )
            if not isinstance(summary, str):
                raise PluginError(f"{what} with the summary {summary!r}; give one line of text")
            if type(preference) is not int or preference < 0:
                raise PluginError(
                    f"{what} with the preference {preference!r}; give a whole number: 0 to be used only when named, 1 "
                    f"or more to be considered by {AUTO}"
                )
            if any(one.seam == seam and one.name == name for one in staged):
                raise PluginError(f"{what} twice; give each its own name")
            rival = self.registrations[seam.name].get(name)
            if rival is not None:
                raise PluginError(
                    f"two plugins offer {seam.section} {name!r}: {rival.plugin.provenance} (entry point "
                    f"{rival.plugin.entry_point!r}) and {info.provenance} (entry point {info.entry_point!r}); "
                    f"{_way_out(rival.plugin, info)}"
                )
            staged.append(
                Registration(
                    seam=seam, name=name, loader=loader, api=api, summary=summary, preference=preference, plugin=info
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


def _entry_points(config: PluginsConfig) -> list[EntryPoint]:
    """The entry points to load, in their order; the file system's plays no part."""
    found = sorted(
        entry_points(group=GROUP), key=lambda point: (_provenance(point)[0] != HOME, _provenance(point), point)
    )
    names = [point.name for point in found]
    for key, wanted in (("allow", config.allow), ("deny", config.deny)):
        for name in wanted:
            if name not in names:
                raise ConfigError(
                    f"[plugins] {key} names {name!r}, but no installed distribution has such an entry point in group "
                    f"{GROUP!r}; {near_misses(name, names)}"
                )
    return [
        point
        for point in found
        if point.name not in config.deny
        and (not config.allow or point.name in config.allow or _provenance(point)[0] == HOME)
    ]


def _provenance(point: EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist is not None else ("unknown", "")

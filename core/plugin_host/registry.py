"""What the plugins of a process have registered: a registry per extension point, and the plugins that failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pluggy
from attrs import field, frozen

from engine.core.errors import PluginError, near_misses
from engine.core.plugin_host.extension_points import ExtensionPoint
from engine.core.plugin_host.faults import import_fault, raise_interrupt
from engine.core.plugin_host.installed import (
    HOME,
    OBJECT,
    Excluded,
    PluginInfo,
    describe_plugin,
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

SLOW_HOOK_SECONDS = 3.0
"""Time after which the log names a plugin whose observing hook has not returned. Less than the 5 s after
which a server ends a process that does not exit."""

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
        return f"{self.plugin} could not be loaded: {import_fault(self.error)}"


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
            raise PluginError(f"{self} could not be imported: {import_fault(error)}") from error
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
    """Normalized names of the third-party distributions whose preferences count like those of built-in plugins."""

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

        Installing a plugin does not activate it: third-party implementations come after the built-in ones, unless
        [plugins] prefer names their distribution or they were passed in from Python. Fallbacks come after all others.
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
        """Call an observing hook of every plugin, the last loaded first. What a plugin raises is logged.

        There is no time limit; after SLOW_HOOK_SECONDS (3 s) the log names the plugin whose hook has not returned.
        """
        for plugin, manager in reversed(list(zip(self.loaded, self.managers, strict=True))):
            caller = getattr(manager.hook, hook)
            if not caller.get_hookimpls():
                continue
            try:
                with _logged_if_slow(plugin, hook):
                    caller(**arguments)
            except BaseException as error:
                raise_interrupt(error)
                _log.exception("%s failed in %s(), which only observes; the engine goes on", plugin, hook)

    @property
    def hook(self) -> pluggy.HookRelay:
        """All plugins' implementations of each hook."""
        return self.manager.hook

    @property
    def seams(self) -> Mapping[str, Registry[Any]]:
        """The name of `registries` in version 0.1."""
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


@contextmanager
def _logged_if_slow(plugin: PluginInfo, hook: str) -> Iterator[None]:
    """Log that the engine waits for a hook, if the `with` block takes longer than SLOW_HOOK_SECONDS."""
    message = "%s has been in %s() for %g s, which holds up the engine until it returns"
    timer = threading.Timer(SLOW_HOOK_SECONDS, _log.warning, (message, plugin, hook, SLOW_HOOK_SECONDS))
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started while Python exits
        timer.start()
    try:
        yield
    finally:
        timer.cancel()

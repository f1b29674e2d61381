"""Chooses the plugin of one extension point: one passed in, one named, or the most preferred that does not refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from engine.core.attention.pair import AttentionPair
from engine.core.config.setting_list import option_places
from engine.core.config.structure import structure_options
from engine.core.config.tree import AUTO, EngineConfig
from engine.core.errors import EngineError, PluginError
from engine.core.plugin_host.extension_points import EXTENSION_POINTS, ExtensionPoint
from engine.core.plugin_host.faults import blame
from engine.core.plugin_host.guard import STARTUP_CALLS, guarded, owner_of
from engine.core.plugin_host.installed import HOME, OBJECT, describe_plugin
from engine.core.plugin_host.questions import Question

if TYPE_CHECKING:
    from engine.core.plugin_host.registry import Plugins, Registration, Registry

MAX_NAMES = 4
"""Maximum number of plugins that a sentence names whose refusals are equal."""


@frozen(kw_only=True)
class ChosenPlugin:
    """The plugin chosen for one extension point."""

    extension_point: str
    name: str
    provenance: str
    """Distribution and version, or "object" for a plugin passed in from Python."""
    reason: str
    """Why this plugin; for auto, with the refusals of the more preferred ones."""
    by_auto: bool = False
    """Whether auto took it, and the configuration does not name it."""

    @property
    def built_in(self) -> bool:
        """Whether the plugin is the engine's own; of a pair, whether both are."""
        return all(one.startswith(f"{HOME} ") for one in self.provenance.split(" and "))

    @property
    def notice(self) -> str | None:
        """A sentence for people who may not know that auto took a third party's plugin; None for any other choice."""
        if not self.by_auto or self.provenance == OBJECT or self.built_in:
            return None
        return (
            f"auto took {self}, which is not built in; name it as {self.section}.name to have it without this notice, "
            f"or deny it in [plugins] ({self.reason})"
        )

    @property
    def section(self) -> str:
        """The section of the configuration that chooses the plugin."""
        [section] = [point.section for point in EXTENSION_POINTS if point.name == self.extension_point]
        return section

    def __str__(self) -> str:
        return describe_plugin(self.section, self.name, self.provenance)

    @property
    def seam(self) -> str:
        """`extension_point`, by its name in 0.1."""
        return self.extension_point


def choose_plugin(
    config: EngineConfig,
    plugins: Plugins,
    point: ExtensionPoint,
    override: object,
    question: Question,
    passed_over: Mapping[tuple[str, str], str] = {},
) -> tuple[Any, ChosenPlugin]:
    """The guarded class (or the instance passed in) of an extension point, and why it was chosen.

    override: a class, or an instance of a scheduling policy, passed in from Python. passed_over: (extension point,
    name) -> why auto does not take this plugin, a sentence.
    Raises PluginError for an unknown, broken or refusing plugin, and where auto finds none that serves.
    """
    if override is not None:
        return _passed_in(point, override, question)
    name, registry = getattr(config, point.section).name, plugins.registries[point.name]
    if name == AUTO:
        faults = {plugin: fault for (place, plugin), fault in passed_over.items() if place == point.name}
        return _most_preferred(point, registry, question, faults)
    cls: Any
    if point.pairs and "," in name:
        cls, provenance = load_pair(point, registry, name)
        choice = _choice(point, name, provenance, "asked for by name")
    else:
        registration = registry.get(name)
        choice = _choice(point, name, registration.plugin.provenance, "asked for by name")
        cls = guarded(registration.load(), str(choice), STARTUP_CALLS[point.name])
    _raise_refusal(cls, choice, question)
    return cls, choice


def _most_preferred(
    point: ExtensionPoint, registry: Registry[Any], question: Question, passed_over: Mapping[str, str]
) -> tuple[Any, ChosenPlugin]:
    """The choice of auto: the most preferred plugin that can be loaded and does not refuse. Raises PluginError.

    passed_over: name -> why auto does not take this plugin, a sentence.
    """
    refusals: dict[str, list[str]] = {}
    for candidate in registry.candidates():
        fault = passed_over.get(candidate.name)
        if fault is not None:
            refusals.setdefault(f"is passed over: {fault}", []).append(candidate.name)
            continue
        try:
            cls = guarded(candidate.load(), str(candidate), STARTUP_CALLS[point.name])
            refusal = ask(cls, question)
        except EngineError as error:
            refusal = str(error)
        if refusal is None:
            reason = "; ".join(["auto: the most preferred that does not refuse", *_sentences(refusals)])
            return cls, _choice(point, candidate.name, candidate.plugin.provenance, reason, by_auto=True)
        refusals.setdefault(f"refuses: {refusal}", []).append(candidate.name)
    reasons = [*_sentences(refusals), *map(str, registry.failures)] or ["auto has no candidate"]
    raise PluginError(
        f"no {point.section} plugin serves this: {'; '.join(reasons)}; name one yourself as {point.section}.name "
        f"(installed: {', '.join(registry.names()) or 'nothing'}) or install one that does"
    )


def _choice(point: ExtensionPoint, name: str, provenance: str, reason: str, *, by_auto: bool = False) -> ChosenPlugin:
    return ChosenPlugin(extension_point=point.name, name=name, provenance=provenance, reason=reason, by_auto=by_auto)


def _raise_refusal(cls: type | AttentionPair, choice: ChosenPlugin, question: Question) -> None:
    """Raise PluginError if a plugin that was named or passed in refuses."""
    refusal = ask(cls, question)
    if refusal is not None:
        raise PluginError(f"{choice} refuses: {refusal}")


def _sentences(refusals: Mapping[str, Sequence[str]]) -> list[str]:
    """A sentence per refusal. refusals: what is said -> the plugins of which it is said."""
    found = []
    for said, names in refusals.items():
        rest = len(names) - MAX_NAMES + 1
        *first, last = [*names[: MAX_NAMES - 1], f"{rest} more"] if rest > 1 else names
        subject = f"{', '.join(first)} and {last}" if first else last
        found.append(f"{subject} {said.replace('refuses:', 'refuse:', 1) if first else said}")
    return found


def options_of(config: EngineConfig, cls: type | AttentionPair, choice: ChosenPlugin) -> Any:
    """The options of the chosen plugin, as an instance of its options_class. Raises ConfigError."""
    with blame(str(choice), "its options_class"):
        return structured(config, choice.section, cls, f"{choice}: {choice.section}.options")


def structured(config: EngineConfig, section: str, cls: Any, where: str) -> Any:
    """The options of a section, as an instance of the plugin's options_class. Raises ConfigError.

    where: the plugin and its section, as errors name them.
    """
    options, options_class = getattr(config, section).options, getattr(cls, "options_class", None)
    return structure_options(options, options_class, where, option_places(config, section))


def load_pair(point: ExtensionPoint, registry: Registry[Any], name: str) -> tuple[AttentionPair, str]:
    """The two attention backends of "first,second" as one, and their provenance. Raises PluginError."""
    first, second = two_plugins(point, registry, name)
    prefill, decode = (guarded(part.load(), str(part), STARTUP_CALLS[point.name]) for part in (first, second))
    pair = AttentionPair((first.name, second.name), (prefill, decode))
    return pair, " and ".join(dict.fromkeys((first.plugin.provenance, second.plugin.provenance)))


def two_plugins(
    point: ExtensionPoint, registry: Registry[Any], name: str
) -> tuple[Registration[Any], Registration[Any]]:
    """The two plugins of "first,second". Raises PluginError."""
    names = [part.strip() for part in name.split(",")]
    if len(names) != 2 or not all(names) or AUTO in names:
        raise PluginError(
            f"{point.section} {name!r} does not name two plugins; write it as {point.pairs}, both by name"
        )
    first, second = map(registry.get, names)
    return first, second


def _passed_in(point: ExtensionPoint, override: object, question: Question) -> tuple[Any, ChosenPlugin]:
    """A class, or an instance of a scheduling policy, passed in from Python."""
    cls = override if isinstance(override, type) else type(override)
    what = f"the {point.section} passed in"
    point.check(cls, what)
    if override is not cls and point.section != "scheduler":
        raise PluginError(f"{what} is an instance of {cls.__qualname__}; pass the class, the engine makes the instance")
    choice = _choice(point, cls.__qualname__, OBJECT, "passed in from Python")
    kind = guarded(cls, str(choice), STARTUP_CALLS[point.name])
    _raise_refusal(kind, choice, question)
    return kind if override is cls else override, choice


def ask(cls: type | AttentionPair, question: Question) -> str | None:
    """The refusal of a plugin's class, a sentence, or None. Raises PluginError for any other answer."""
    answer = question(cls)
    if answer is not None and not (isinstance(answer, str) and answer):
        raise PluginError(f"{owner_of(cls)} answers refuses() with {answer!r}; it must be a sentence or None")
    return answer

"""Chooses the plugin of each extension point: resolves names to classes and collects refusals."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from engine.core.attention.pair import AttentionPair
from engine.core.config.setting import changed_settings
from engine.core.config.setting_list import option_places
from engine.core.config.structure import structure_options
from engine.core.config.tree import AUTO, EngineConfig, SpeculatorConfig
from engine.core.errors import ConfigError, EngineError, PluginError, PluginFaultError, near_misses
from engine.core.plugin_host.derived import shape_of
from engine.core.plugin_host.drafter import DrafterChoices, DrafterParts, resolve_drafter
from engine.core.plugin_host.extension_points import EXTENSION_POINTS, ExtensionPoint
from engine.core.plugin_host.faults import CONSTRUCTOR, blame
from engine.core.plugin_host.guard import STARTUP_CALLS, guarded, owner_of
from engine.core.plugin_host.installed import HOME, OBJECT, describe_plugin
from engine.core.plugin_host.questions import (
    Question,
    attention_question,
    model_question,
    parser_question,
    quant_question,
    questions_of_machine,
    served_model_question,
    speculator_question,
)
from engine.core.speculators.device import DeviceSpeculator

MAX_NAMES = 4
"""Maximum plugins that a sentence about the equal refusals of several names."""

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.device import DeviceInfo
    from engine.core.executors.base import Executor
    from engine.core.grammars.base import GrammarBackend
    from engine.core.models.base import Model
    from engine.core.parsers.base import Parser, Templates
    from engine.core.plugin_host.registry import Manifest, Plugins, Registration, Registry
    from engine.core.quant.base import QuantMethod
    from engine.core.schedulers.policy import SchedulingPolicy
    from engine.core.speculators.base import Speculator


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
        [section] = [point.section for point in EXTENSION_POINTS if point.name == self.extension_point]
        return (
            f"auto took {self}, which is not built in; name it as {section}.name to have it without this notice, or "
            f"deny it in [plugins] ({self.reason})"
        )

    def __str__(self) -> str:
        [section] = [point.section for point in EXTENSION_POINTS if point.name == self.extension_point]
        return describe_plugin(section, self.name, self.provenance)

    @property
    def seam(self) -> str:
        """`extension_point`, by its name in 0.1."""
        return self.extension_point


@frozen(kw_only=True)
class Parts:
    """The plugins of one engine: their classes and validated options."""

    attention: type[AttentionBackend[Any, Any]] | AttentionPair | None
    """None if all layers of the model keep a state."""
    quant: type[QuantMethod[Any]]
    policy: SchedulingPolicy[Any]
    executor: type[Executor]
    model: type[Model]
    options: Mapping[str, Any]
    """Extension point (attention, quant, executors, models, grammars, speculators) -> an instance of the plugin's
    options_class, or None."""
    choices: tuple[ChosenPlugin, ...]
    grammar: type[GrammarBackend[Any]] | None = None
    """None if auto found none: requests with a grammar are then refused."""
    no_grammar: str = ""
    """Why auto found no grammar backend."""
    speculator: type[Speculator[Any]] | None = None
    """A speculator on the host; None: there is none."""
    drafter: DrafterParts | None = None
    """A speculator on the device; None: there is none."""
    manifest: Manifest = ()
    """The plugins this process has loaded; other processes of the engine compare theirs (Plugins.verify)."""
    remote_speculator: bool = False
    """Whether the engine's process has a speculator that this process does not know: one passed in from Python."""

    @property
    def speculates(self) -> bool:
        """Whether there is a speculator: in this process, on the device, or in the engine's process."""
        return self.speculator is not None or self.drafter is not None or self.remote_speculator

    def choice_at_fault(self, fault: PluginFaultError) -> ChosenPlugin | None:
        """The choice of auto whose constructor raised `fault`; None if there is none.

        A worker's fault arrives as its sentence, so the sentence must name the plugin.
        """
        calls = (CONSTRUCTOR, "from_checkpoint()")
        for choice in self.choices:
            if choice.by_auto and any(f"{choice} failed in {call}:" in str(fault) for call in calls):
                return choice
        return None

    @property
    def not_built_in(self) -> str:
        """The end of an error message: the plugins that make logits and are not built in; empty if there are none."""
        makers = ("models", "attention", "quant", "executors")
        found = [str(one) for one in self.choices if one.extension_point in makers and not one.built_in]
        return f"; not built in: {', '.join(found)}" if found else ""

    def owner(self, extension_point: str) -> str:
        """The plugin of an extension point, as errors name it."""
        found = (str(choice) for choice in self.choices if choice.extension_point == extension_point)
        return next(found, f"the plugin of {extension_point}")


def resolve(
    config: EngineConfig,
    plugins: Plugins,
    device: DeviceInfo,
    checkpoint: Mapping[str, Any],
    overrides: Mapping[str, object] = {},
    first: DeviceInfo | None = None,
    passed_over: Mapping[tuple[str, str], str] = {},
) -> Parts:
    """Choose the plugin of each extension point: passed in, named, or by auto the most preferred that does not refuse.

    Attention may name two, "PREFILL,DECODE". Every class is guarded: its start-up calls name the plugin in errors.

    checkpoint: the model's config.json. overrides: section of the configuration (attention, quant, scheduler, executor,
    model, grammar, speculator) -> a class that need not be registered; for scheduler an instance too. first: the first
    of the executor's devices, which the executor is asked about; None: `device`. passed_over: (extension point, name)
    -> why auto does not take this plugin, a sentence. A scheduling policy whose constructor raises is passed over here.
    Raises PluginError for an unknown, broken or refusing plugin, ConfigError for options the plugin does not have.
    """
    sections = {point.section: point for point in EXTENSION_POINTS}
    for section in overrides:
        if section not in sections:
            raise PluginError(f"there is no extension point {section!r}; {near_misses(section, sections)}")
    chosen: dict[str, Any] = {}
    options: dict[str, Any] = {}
    choices: list[ChosenPlugin] = []

    def find(section: str, question: Question) -> tuple[Any, ChosenPlugin]:
        return _choose(config, plugins, sections[section], overrides.get(section), question, passed_over)

    def choose(section: str, question: Question) -> None:
        point = sections[section]
        found, choice = find(section, question)
        if isinstance(found, type | AttentionPair):
            options[point.name] = _options(config, found, choice)
        elif getattr(config, section).options:
            raise ConfigError(
                f"{section}.options is set, but the {section} was passed in as an instance; "
                "give the options to its constructor"
            )
        chosen[section] = found
        choices.append(choice)

    by_auto = config.model.name == AUTO and "model" not in overrides
    served = served_model_question(config, device, checkpoint, lambda *asked: find(*asked)[0])
    choose("model", served if by_auto else model_question(checkpoint))
    shape_of(chosen["model"], checkpoint)  # a fault of the model is reported before refusals of others
    choose("quant", quant_question(checkpoint, device))
    drafter: DrafterParts | None = None
    if config.speculator.name or "speculator" in overrides:
        choose("speculator", speculator_question(config, checkpoint, chosen["model"]))
        if issubclass(chosen["speculator"], DeviceSpeculator):
            target = shape_of(chosen["model"], checkpoint)
            found, given = chosen.pop("speculator"), options.pop("speculators")
            helpers = _drafter_choices(config, plugins, device)
            drafter = resolve_drafter(found, given, config, target, checkpoint, device, helpers)
    asked = attention_question(config, device, checkpoint, chosen["model"], chosen["quant"], drafter)
    named = config.attention.name != AUTO or "attention" in overrides
    if named or shape_of(chosen["model"], checkpoint).has_attention:
        choose("attention", asked)
    policies: dict[type, SchedulingPolicy[Any]] = {}
    questions = questions_of_machine(config, first or device)
    choose("scheduler", _making(policies, config) if config.scheduler.name == AUTO else questions["scheduler"])
    choose("executor", questions["executor"])
    no_grammar = ""
    try:
        choose("grammar", questions["grammar"])
    except PluginError as error:
        if config.grammar.name != AUTO or "grammar" in overrides:
            raise
        if config.grammar.options:
            raise ConfigError(f"grammar.options is set, but {error}; or leave grammar.options out") from error
        no_grammar = str(error)  # an engine without one still serves
    policy = chosen["scheduler"]
    if isinstance(policy, type):
        given = options.pop("schedulers")
        policy = policies[policy] if policy in policies else policy(given)
    return Parts(
        model=chosen["model"],
        attention=chosen.get("attention"),
        quant=chosen["quant"],
        policy=policy,
        executor=chosen["executor"],
        options=options,
        choices=tuple(choices),
        manifest=plugins.manifest(),
        grammar=chosen.get("grammar"),
        no_grammar=no_grammar,
        speculator=chosen.get("speculator"),
        drafter=drafter,
    )


def check_names(config: EngineConfig, plugins: Plugins, overrides: Collection[str] = ()) -> None:
    """Raise what `resolve` raises for an unknown name and for options that the scheduler refuses, and ConfigError for
    settings of a speculator where none is chosen.

    Much earlier than `resolve`: this needs neither a device nor, unless a scheduling policy imports it, torch.
    overrides: sections whose plugin is passed in.
    """
    if not config.speculator.name and "speculator" not in overrides:
        _refuse_speculator_settings(config.speculator)
    for point in EXTENSION_POINTS:
        name, registry = getattr(config, point.section).name, plugins.registries[point.name]
        if point.section in overrides or (point.optional and not name):
            continue
        if point.pairs and "," in name:
            _pair(point, registry, name)
        elif name != AUTO:
            registry.get(name)
        if point.section == "scheduler":
            _options(config, *_choose(config, plugins, point, None, lambda cls: cls.refuses()))


def _refuse_speculator_settings(config: SpeculatorConfig) -> None:
    """Raise ConfigError for settings other than the defaults, where no speculator is chosen."""
    for name in changed_settings(config):
        raise ConfigError(
            f"speculator.{name} is set, but no speculator is chosen; name one as speculator.name (--speculator), or"
            f" leave speculator.{name} out"
        )


def _drafter_choices(config: EngineConfig, plugins: Plugins, device: DeviceInfo) -> DrafterChoices:
    """How the model class and the quantization method of a speculator's checkpoint are chosen."""
    points = {point.section: point for point in EXTENSION_POINTS}

    def find_model(checkpoint: Mapping[str, Any]) -> type[Model]:
        own = evolve(config, model=evolve(config.model, name=AUTO, options={}), option_places={})
        cls: type[Model] = _choose(own, plugins, points["model"], None, model_question(checkpoint))[0]
        return cls

    def choose_quant(checkpoint: Mapping[str, Any]) -> tuple[type[QuantMethod[Any]], Any, str]:
        quant = evolve(config.quant, name=config.speculator.quant, options={})
        own = evolve(config, quant=quant, option_places={})
        cls, choice = _choose(own, plugins, points["quant"], None, quant_question(checkpoint, device))
        return cls, _options(own, cls, choice), str(choice)

    return DrafterChoices(find_model=find_model, find_quant=choose_quant)


def find_quant(
    config: EngineConfig, plugins: Plugins, device: DeviceInfo, checkpoint: Mapping[str, Any]
) -> type[QuantMethod[Any]]:
    """Choose the quantization method alone. Raises as `resolve`."""
    [point] = [point for point in EXTENSION_POINTS if point.section == "quant"]
    question = quant_question(checkpoint, device)
    found: type[QuantMethod[Any]] = _choose(config, plugins, point, None, question)[0]
    return found


def choose_parser(config: EngineConfig, plugins: Plugins, templates: Templates) -> tuple[Parser[Any], ChosenPlugin]:
    """Choose and make the output parser. Raises PluginError or ConfigError."""
    [point] = [point for point in EXTENSION_POINTS if point.section == "parser"]
    question = parser_question(templates, by_auto=config.parser.name == AUTO)
    cls, choice = _choose(config, plugins, point, None, question)
    return cls(_options(config, cls, choice), templates), choice


def _making(policies: dict[type, SchedulingPolicy[Any]], config: EngineConfig) -> Question:
    """Asks whether a scheduling policy refuses, and makes it, so that auto passes over one that cannot be made.

    policies: class -> the policy, to be filled. Options that a policy does not have are reported later.
    """

    def question(cls: Any) -> str | None:
        refusal: str | None = cls.refuses()
        if refusal is None:
            with suppress(ConfigError):
                policies[cls] = cls(_structured(config, "scheduler", cls, "scheduler.options"))
        return refusal

    return question


def _choose(
    config: EngineConfig,
    plugins: Plugins,
    point: ExtensionPoint,
    override: object,
    question: Question,
    passed_over: Mapping[tuple[str, str], str] = {},
) -> tuple[Any, ChosenPlugin]:
    """The guarded class (or the instance passed in) of an extension point. Raises PluginError."""
    if override is not None:
        return _passed_in(point, override, question)
    name, registry = getattr(config, point.section).name, plugins.registries[point.name]

    def chosen(plugin: str, provenance: str, reason: str, *, by_auto: bool = False) -> ChosenPlugin:
        return ChosenPlugin(
            extension_point=point.name, name=plugin, provenance=provenance, reason=reason, by_auto=by_auto
        )

    cls: Any
    if point.pairs and "," in name:
        cls, provenance = load_pair(point, registry, name)
        choice = chosen(name, provenance, "asked for by name")
    elif name != AUTO:
        registration = registry.get(name)
        choice = chosen(name, registration.plugin.provenance, "asked for by name")
        cls = guarded(registration.load(), str(choice), STARTUP_CALLS[point.name])
    else:
        refusals: dict[str, list[str]] = {}
        for candidate in registry.candidates():
            fault = passed_over.get((point.name, candidate.name))
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
                return cls, chosen(candidate.name, candidate.plugin.provenance, reason, by_auto=True)
            refusals.setdefault(f"refuses: {refusal}", []).append(candidate.name)
        reasons = [*_sentences(refusals), *map(str, registry.failures)] or ["auto has no candidate"]
        raise PluginError(
            f"no {point.section} plugin serves this: {'; '.join(reasons)}; name one yourself as {point.section}.name "
            f"(installed: {', '.join(registry.names()) or 'nothing'}) or install one that does"
        )
    refusal = ask(cls, question)
    if refusal:
        raise PluginError(f"{choice} refuses: {refusal}")
    return cls, choice


def _sentences(refusals: Mapping[str, Sequence[str]]) -> list[str]:
    """A sentence per refusal. refusals: what is said -> the plugins of which it is said."""
    found = []
    for said, names in refusals.items():
        rest = len(names) - MAX_NAMES + 1
        *first, last = [*names[: MAX_NAMES - 1], f"{rest} more"] if rest > 1 else names
        subject = f"{', '.join(first)} and {last}" if first else last
        found.append(f"{subject} {said.replace('refuses:', 'refuse:', 1) if first else said}")
    return found


def _options(config: EngineConfig, cls: type | AttentionPair, choice: ChosenPlugin) -> Any:
    """The options of the chosen plugin, as an instance of its options_class. Raises ConfigError."""
    [section] = [point.section for point in EXTENSION_POINTS if point.name == choice.extension_point]
    with blame(str(choice), "its options_class"):
        return _structured(config, section, cls, f"{choice}: {section}.options")


def _structured(config: EngineConfig, section: str, cls: Any, where: str) -> Any:
    """The options of a section, as an instance of the plugin's options_class. Raises ConfigError."""
    options, options_class = getattr(config, section).options, getattr(cls, "options_class", None)
    return structure_options(options, options_class, where, option_places(config, section))


def load_pair(point: ExtensionPoint, registry: Registry[Any], name: str) -> tuple[AttentionPair, str]:
    """The two attention backends of "first,second" as one, and their provenance. Raises PluginError."""
    first, second = _pair(point, registry, name)
    prefill, decode = (guarded(part.load(), str(part), STARTUP_CALLS[point.name]) for part in (first, second))
    pair = AttentionPair((first.name, second.name), (prefill, decode))
    return pair, " and ".join(dict.fromkeys((first.plugin.provenance, second.plugin.provenance)))


def _pair(point: ExtensionPoint, registry: Registry[Any], name: str) -> tuple[Registration[Any], Registration[Any]]:
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
    choice = ChosenPlugin(
        extension_point=point.name, name=cls.__qualname__, provenance=OBJECT, reason="passed in from Python"
    )
    kind = guarded(cls, str(choice), STARTUP_CALLS[point.name])
    refusal = ask(kind, question)
    if refusal:
        raise PluginError(f"{choice} refuses: {refusal}")
    return kind if override is cls else override, choice


def ask(cls: type | AttentionPair, question: Question) -> str | None:
    """The refusal of a plugin's class, a sentence, or None. Raises PluginError for any other answer."""
    answer = question(cls)
    if answer is not None and not (isinstance(answer, str) and answer):
        raise PluginError(f"{owner_of(cls)} answers refuses() with {answer!r}; it must be a sentence or None")
    return answer

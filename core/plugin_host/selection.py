"""Chooses the plugins of an engine, extension point by extension point, and makes those that are made early."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from engine.core.attention.pair import AttentionPair
from engine.core.config.setting import changed_settings
from engine.core.config.tree import AUTO, EngineConfig, SpeculatorConfig
from engine.core.errors import ConfigError, PluginError, PluginFaultError, near_misses
from engine.core.plugin_host.choice import ChosenPlugin, choose_plugin, options_of, structured, two_plugins
from engine.core.plugin_host.derived import shape_of
from engine.core.plugin_host.drafter import DrafterChoices, DrafterParts, resolve_drafter
from engine.core.plugin_host.extension_points import EXTENSION_POINTS
from engine.core.plugin_host.faults import CONSTRUCTOR
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

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.device import DeviceInfo
    from engine.core.executors.base import Executor
    from engine.core.grammars.base import GrammarBackend
    from engine.core.models.base import Model
    from engine.core.parsers.base import Parser, Templates
    from engine.core.plugin_host.registry import Manifest, Plugins
    from engine.core.quant.base import QuantMethod
    from engine.core.schedulers.policy import SchedulingPolicy
    from engine.core.speculators.base import Speculator


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
        return choose_plugin(config, plugins, sections[section], overrides.get(section), question, passed_over)

    def choose(section: str, question: Question) -> None:
        point = sections[section]
        found, choice = find(section, question)
        if isinstance(found, type | AttentionPair):
            options[point.name] = options_of(config, found, choice)
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
            two_plugins(point, registry, name)
        elif name != AUTO:
            registry.get(name)
        if point.section == "scheduler":
            options_of(config, *choose_plugin(config, plugins, point, None, lambda cls: cls.refuses()))


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
        cls: type[Model] = choose_plugin(own, plugins, points["model"], None, model_question(checkpoint))[0]
        return cls

    def choose_quant(checkpoint: Mapping[str, Any]) -> tuple[type[QuantMethod[Any]], Any, str]:
        quant = evolve(config.quant, name=config.speculator.quant, options={})
        own = evolve(config, quant=quant, option_places={})
        cls, choice = choose_plugin(own, plugins, points["quant"], None, quant_question(checkpoint, device))
        return cls, options_of(own, cls, choice), str(choice)

    return DrafterChoices(find_model=find_model, find_quant=choose_quant)


def find_quant(
    config: EngineConfig, plugins: Plugins, device: DeviceInfo, checkpoint: Mapping[str, Any]
) -> type[QuantMethod[Any]]:
    """Choose the quantization method alone. Raises as `resolve`."""
    [point] = [point for point in EXTENSION_POINTS if point.section == "quant"]
    question = quant_question(checkpoint, device)
    found: type[QuantMethod[Any]] = choose_plugin(config, plugins, point, None, question)[0]
    return found


def choose_parser(config: EngineConfig, plugins: Plugins, templates: Templates) -> tuple[Parser[Any], ChosenPlugin]:
    """Choose and make the output parser. Raises PluginError or ConfigError."""
    [point] = [point for point in EXTENSION_POINTS if point.section == "parser"]
    question = parser_question(templates, by_auto=config.parser.name == AUTO)
    cls, choice = choose_plugin(config, plugins, point, None, question)
    return cls(options_of(config, cls, choice), templates), choice


def _making(policies: dict[type, SchedulingPolicy[Any]], config: EngineConfig) -> Question:
    """A question that also makes the scheduling policy, so that auto passes over one whose constructor raises.

    policies: class -> the policy, to be filled. A policy that refuses its options is left out; they are reported later.
    """

    def question(cls: Any) -> str | None:
        refusal: str | None = cls.refuses()
        if refusal is None:
            with suppress(ConfigError):
                policies[cls] = cls(structured(config, "scheduler", cls, "scheduler.options"))
        return refusal

    return question

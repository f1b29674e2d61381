"""Which plugin is chosen for each extension point: by name, by auto, passed in; refusals, options and reasons."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import evolve, frozen

from engine.core.attention.base import AttentionBackend
from engine.core.config.load import load_config
from engine.core.config.tree import (
    AttentionConfig,
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    GrammarConfig,
    ModelConfig,
    PluginsConfig,
    QuantConfig,
    SchedulerConfig,
    SpeculatorConfig,
)
from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError, ConfigError, PluginError
from engine.core.executors.base import Executor
from engine.core.hooks import hookimpl
from engine.core.models.base import KVShape, Model, ModelSpec
from engine.core.plugin_host.cache_groups import cache_layout
from engine.core.plugin_host.choice import ChosenPlugin
from engine.core.plugin_host.derived import attention_spec, max_len, resolve_dtype, resolve_kv_dtype, use_graphs
from engine.core.plugin_host.extension_points import EXTENSION_POINTS
from engine.core.plugin_host.installed import PluginInfo
from engine.core.plugin_host.load import load_plugins
from engine.core.plugin_host.questions import model_question
from engine.core.plugin_host.registry import Plugins
from engine.core.plugin_host.selection import Parts, check_names, find_quant, resolve
from engine.core.quant.base import QuantMethod
from engine.core.schedulers.policy import SchedulingPolicy
from engine.core.speculators.base import Speculator, SpeculatorSpec

CPU = DeviceInfo(type="cpu")
GPU = DeviceInfo(type="cuda", capability=(9, 0))
SHAPE = ModelSpec(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    vocab_size=100,
    max_len=512,
    sliding_windows=(None, 16),
    scale=0.5,
    softcap=30.0,
)


def concrete(contract: type, **members: Any) -> type[Any]:
    """A class that fills every abstract method of a contract."""
    filled = {name: lambda *_: None for name in contract.__abstractmethods__}  # type: ignore[attr-defined]
    return type("Filled", (contract,), {**filled, "api": "1", **members})


def refusing(answer: object) -> classmethod:
    return classmethod(lambda cls, *_: answer)


@frozen
class Options:
    splits: int = 1


MODEL = concrete(Model, refuses=refusing(None), spec=classmethod(lambda cls, config: SHAPE))
POLICY = concrete(SchedulingPolicy, options_class=Options, __init__=SchedulingPolicy.__init__)


def registry(*offers: tuple[str, str, Any, int], defaults: bool = True) -> Plugins:
    """Only these implementations: (extension point, name, class or exception, preference), and one for each other."""

    def hook(point: str) -> Any:
        def offer(register: Any) -> None:
            for where, name, cls, preference in wanted:
                if where == point:
                    register(name, load(cls), api="1", summary="", preference=preference)

        offer.__name__ = f"register_{point}"
        return staticmethod(hookimpl(offer))

    def load(cls: Any) -> Any:
        def loader() -> Any:
            if isinstance(cls, Exception):
                raise cls
            return cls

        return loader

    wanted = list(offers)
    if defaults:
        for point, cls in (
            ("models", MODEL),
            ("attention", concrete(AttentionBackend)),
            ("quant", concrete(QuantMethod)),
            ("schedulers", POLICY),
            ("executors", concrete(Executor)),
        ):
            if point not in [offer[0] for offer in offers]:
                wanted.append((point, f"the-{point}", cls, 1))
    points = ("models", "attention", "quant", "schedulers", "executors", "speculators")
    plugin = type("Plugin", (), {f"register_{point}": hook(point) for point in points})
    return load_plugins(PluginsConfig(deny=("builtin",)), extra=[plugin()])


def chosen(parts: Parts, point: str) -> tuple[str, str]:
    [choice] = [one for one in parts.choices if one.extension_point == point]
    return choice.name, choice.reason


def test_auto_takes_the_most_preferred_that_does_not_refuse_and_says_why() -> None:
    good, better = concrete(AttentionBackend), concrete(AttentionBackend, refuses=refusing("needs a GPU; use --device"))
    plugins = registry(
        ("attention", "good", good, 1), ("attention", "better", better, 5), ("attention", "shy", good, 0)
    )
    parts = resolve(EngineConfig(), plugins, CPU, {})
    assert parts.attention.__wrapped__ is good
    name, reason = chosen(parts, "attention")
    assert name == "good"
    assert "better refuses: needs a GPU; use --device" in reason
    assert "shy" not in reason


def test_an_engine_without_grammar_plugin_serves_and_knows_why() -> None:
    parts = resolve(EngineConfig(), registry(), CPU, {})
    assert parts.grammar is None
    assert "auto has no candidate" in parts.no_grammar
    with pytest.raises(PluginError, match="there is no grammar plugin 'mine'"):
        resolve(evolve(EngineConfig(), grammar=GrammarConfig(name="mine")), registry(), CPU, {})


def speculating(name: str, **settings: Any) -> EngineConfig:
    return evolve(EngineConfig(), speculator=SpeculatorConfig(name=name, **settings))


def test_an_engine_has_no_speculator_unless_one_is_named() -> None:
    plugins = registry(("speculators", "bold", concrete(Speculator), 1))
    assert resolve(EngineConfig(), plugins, CPU, {}).speculator is None


@pytest.mark.parametrize(
    "settings",
    [{"options": {"splits": 2}}, {"model": "a"}, {"quant": "int8"}, {"max_drafts": 3}, {"length": "fixed"}],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_a_speculator_are_refused_where_none_is_chosen(settings: dict[str, Any]) -> None:
    [name] = settings
    plugins = registry(("speculators", "bold", concrete(Speculator), 1))
    with pytest.raises(ConfigError, match=rf"speculator\.{name} is set, but no speculator is chosen; name one as"):
        check_names(speculating("", **settings), plugins)
    check_names(speculating("bold", **settings), plugins)
    check_names(speculating("", **settings), plugins, {"speculator"})


def test_options_of_a_grammar_plugin_are_refused_where_auto_finds_none() -> None:
    config = evolve(EngineConfig(), grammar=GrammarConfig(options={"splits": 2}))
    with pytest.raises(ConfigError, match=r"grammar\.options is set, but no grammar plugin serves this: auto has no"):
        resolve(config, registry(), CPU, {})


@pytest.mark.parametrize("name", ["bold", "auto"])
def test_a_speculator_is_chosen_by_name_or_by_auto_and_asked_with_shape_and_config(name: str) -> None:
    asked: list[SpeculatorSpec] = []
    bold = concrete(Speculator, options_class=Options, refuses=classmethod(lambda cls, spec: asked.append(spec)))
    plugins = registry(("speculators", "bold", bold, 1))
    config = {"model_type": "mine"}
    parts = resolve(speculating(name, options={"splits": 2}, max_drafts=3), plugins, CPU, config)
    assert parts.speculator is not None
    assert parts.speculator.__wrapped__ is bold  # type: ignore[attr-defined]
    assert parts.options["speculators"] == Options(splits=2)
    assert chosen(parts, "speculators")[0] == "bold"
    [spec] = asked
    assert spec.target is not None
    assert spec == SpeculatorSpec(vocab_size=100, max_len=512, max_drafts=3, target=spec.target, target_config=config)


def test_a_speculator_passed_in_is_taken_and_one_that_refuses_is_an_error() -> None:
    shy = concrete(Speculator, refuses=refusing("needs a table; give one"))
    assert resolve(EngineConfig(), registry(), CPU, {}, {"speculator": concrete(Speculator)}).speculator is not None
    with pytest.raises(PluginError, match="refuses: needs a table; give one"):
        resolve(EngineConfig(), registry(), CPU, {}, {"speculator": shy})
    with pytest.raises(PluginError, match="there is no speculator plugin 'mine'"):
        resolve(speculating("mine"), registry(), CPU, {})


def test_auto_considers_a_fallback_after_all_others() -> None:
    any_model, own = MODEL, concrete(Model, refuses=refusing(None), spec=MODEL.spec)

    class Offers:
        @staticmethod
        @hookimpl
        def register_models(register: Any) -> None:
            register("any", lambda: any_model, api="1", summary="", preference=9, fallback=True)
            register("own", lambda: own, api="1", summary="", preference=1)

    plugins = load_plugins(PluginsConfig(deny=("builtin",)), extra=[Offers()])
    assert [one.name for one in plugins.models.candidates()] == ["own", "any"]


def test_equal_preference_keeps_the_order_of_loading() -> None:
    one, two = concrete(AttentionBackend), concrete(AttentionBackend)
    plugins = registry(("attention", "z-first", one, 1), ("attention", "a-second", two, 1))
    assert resolve(EngineConfig(), plugins, CPU, {}).attention.__wrapped__ is one


def test_auto_passes_over_a_class_that_cannot_be_imported_or_crashes() -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError("crash")

    good = concrete(QuantMethod)
    plugins = registry(
        ("quant", "gone", ImportError("no such library"), 9),
        ("quant", "crashing", concrete(QuantMethod, refuses=classmethod(crash)), 8),
        ("quant", "vague", concrete(QuantMethod, refuses=refusing(True)), 7),
        ("quant", "good", good, 1),
    )
    parts = resolve(EngineConfig(), plugins, CPU, {})
    assert parts.quant.__wrapped__ is good
    reason = chosen(parts, "quant")[1]
    for part in ("no such library", "ZeroDivisionError: crash", "it must be a sentence or None"):
        assert part in reason


@pytest.mark.parametrize("section", ["model", "attention", "quant", "scheduler", "executor", "speculator"])
@pytest.mark.parametrize("answer", ["", True])
def test_an_answer_of_refuses_that_is_no_sentence_is_an_error(section: str, answer: object) -> None:
    [point] = [point for point in EXTENSION_POINTS if point.section == section]
    vague = concrete(point.contract, refuses=refusing(answer), spec=classmethod(lambda cls, config: SHAPE))
    plugins = registry((point.name, "vague", vague, 1))
    named: Any = {section: evolve(getattr(EngineConfig(), section), name="vague")}
    message = rf"^{section} 'vague' .* answers refuses\(\) with {answer!r}; it must be a sentence or None$"
    with pytest.raises(PluginError, match=message):
        resolve(EngineConfig(**named), plugins, CPU, {})
    if section != "speculator":
        with pytest.raises(PluginError, match=rf"vague refuses: .* with {answer!r}; it must be a sentence or None"):
            resolve(EngineConfig(), plugins, CPU, {})


def test_nothing_left_for_auto_lists_every_refusal() -> None:
    plugins = registry(
        ("models", "aa", concrete(Model, refuses=refusing("builds only A")), 1),
        ("models", "bb", concrete(Model, refuses=refusing("builds only B")), 1),
        ("models", "cc", MODEL, 0),
    )
    with pytest.raises(PluginError) as caught:
        resolve(EngineConfig(), plugins, CPU, {})
    for part in ("no model plugin serves this", "aa refuses: builds only A", "bb refuses: builds only B", "cc"):
        assert part in str(caught.value)
    named = evolve(EngineConfig(), model=ModelConfig(name="cc"))
    assert resolve(named, plugins, CPU, {}).model.__wrapped__ is MODEL


@pytest.mark.parametrize(
    ("count", "subject"),
    [
        (1, "m0 refuses: "),
        (2, "m0 and m1 refuse: "),
        (4, "m0, m1, m2 and m3 refuse: "),
        (26, "m0, m1, m2 and 23 more refuse: "),
    ],
)
def test_equal_refusals_are_one_sentence_in_the_reason_and_in_the_error(count: int, subject: str) -> None:
    strange = concrete(Model, refuses=refusing("this checkpoint is strange"))
    other = concrete(Model, refuses=refusing("no tide"))
    refused = [("models", f"m{number}", strange, 90) for number in range(count)]
    parts = resolve(
        EngineConfig(), registry(*refused, ("models", "other", other, 80), ("models", "own", MODEL, 1)), CPU, {}
    )
    sentence = f"{subject}this checkpoint is strange; other refuses: no tide"
    assert chosen(parts, "models") == ("own", f"auto: the most preferred that does not refuse; {sentence}")
    with pytest.raises(PluginError, match=f"no model plugin serves this: {sentence}; name one yourself"):
        resolve(EngineConfig(), registry(*refused, ("models", "other", other, 80)), CPU, {})


def test_built_in_models_refuse_another_architecture_in_equal_words() -> None:
    ask = model_question({"model_type": "strange", "architectures": ["StrangeForCausalLM"]})
    refusals = Counter(ask(one.load()) for one in load_plugins().models.candidates() if not one.fallback)
    assert list(refusals) == ["this checkpoint is StrangeForCausalLM, another architecture"]


def test_an_empty_extension_point_is_an_error() -> None:
    with pytest.raises(PluginError, match=r"no model plugin serves this: auto has no candidate.*installed: nothing"):
        resolve(EngineConfig(), registry(defaults=False), CPU, {})


def test_a_named_plugin_that_refuses_raises_its_sentence() -> None:
    bad = concrete(Executor, refuses=refusing("it needs two GPUs; use another"))
    plugins = registry(("executors", "good", concrete(Executor), 5), ("executors", "bad", bad, 1))
    config = evolve(EngineConfig(), executor=ExecutorConfig(name="bad"))
    with pytest.raises(
        PluginError, match="executor 'bad' passed in from Python refuses: it needs two GPUs; use another"
    ):
        resolve(config, plugins, CPU, {})


def test_a_named_plugin_that_cannot_be_imported_raises_its_cause() -> None:
    plugins = registry(("quant", "gone", ImportError("no such library"), 0))
    with pytest.raises(PluginError, match="no such library") as caught:
        resolve(evolve(EngineConfig(), quant=QuantConfig(name="gone")), plugins, CPU, {})
    assert isinstance(caught.value.__cause__, ImportError)


def test_refuses_is_asked_with_what_the_contract_says() -> None:
    asked: dict[str, Any] = {}

    def note(name: str) -> Any:
        return classmethod(lambda cls, *arguments: asked.update({name: arguments}))

    plugins = registry(
        ("models", "m", concrete(Model, refuses=note("models"), spec=classmethod(lambda cls, config: SHAPE)), 1),
        ("attention", "a", concrete(AttentionBackend, refuses=note("attention")), 1),
        ("quant", "q", concrete(QuantMethod, refuses=note("quant")), 1),
        ("schedulers", "s", concrete(SchedulingPolicy, refuses=note("schedulers")), 1),
        ("executors", "e", concrete(Executor, refuses=note("executors")), 1),
    )
    config, checkpoint = EngineConfig(), {"quantization_config": {"bits": 4}}
    resolve(config, plugins, GPU, checkpoint)
    assert asked == {
        "models": (checkpoint,),
        "attention": (cache_layout(SHAPE, config, "float32", 512, "float32").groups[-1].spec, GPU),
        "quant": ({"bits": 4}, GPU),
        "schedulers": (),
        "executors": (config, GPU),
    }
    second = evolve(GPU, index=1)  # as in a worker
    resolve(config, plugins, second, checkpoint, first=GPU)
    assert [asked[point][-1] for point in ("attention", "quant", "executors")] == [second, second, GPU]


def test_ranks_are_asked_for_their_share_and_refused_where_there_is_none() -> None:
    asked = []
    attention = concrete(AttentionBackend, refuses=classmethod(lambda cls, spec, device: asked.append(spec)))
    plugins = registry(("attention", "a", attention, 1))
    resolve(EngineConfig(executor=ExecutorConfig(tensor_parallel=4)), plugins, GPU, {})
    assert (asked[0].num_heads, asked[0].num_kv_heads) == (1, 1)
    with pytest.raises(ConfigError, match=r"3 ranks cannot share .* these numbers of ranks can: 1, 2, 4"):
        resolve(EngineConfig(executor=ExecutorConfig(tensor_parallel=3)), plugins, GPU, {})


def test_a_block_size_the_backend_cannot_read_is_a_refusal() -> None:
    picky = concrete(AttentionBackend, block_sizes=(64, 128))
    plugins = registry(("attention", "picky", picky, 1))
    with pytest.raises(PluginError, match=r"picky refuses: it reads KV blocks of 64 or 128 tokens, not 16"):
        resolve(EngineConfig(), plugins, CPU, {})
    config = evolve(EngineConfig(), cache=CacheConfig(block_size=128))
    assert resolve(config, plugins, CPU, {}).attention.__wrapped__ is picky


def pair(name: str, **first: Any) -> tuple[EngineConfig, Plugins]:
    """A configuration that names two of these: first (block sizes and refusal as given), and second with options."""
    plugins = registry(
        ("attention", "first", concrete(AttentionBackend, **first), 1),
        ("attention", "second", concrete(AttentionBackend, options_class=Options), 1),
    )
    return evolve(EngineConfig(), attention=AttentionConfig(name=name)), plugins


def test_attention_may_name_two() -> None:
    config, plugins = pair("first, second", block_sizes=(64, 16))
    config = evolve(config, attention=evolve(config.attention, options={"decode": {"splits": 3}}))
    parts = resolve(config, plugins, CPU, {})
    assert parts.attention.names == ("first", "second")  # type: ignore[attr-defined]
    assert parts.attention.block_sizes == (64, 16)
    assert parts.options["attention"].decode == Options(3)
    [choice] = [one for one in parts.choices if one.extension_point == "attention"]
    assert (choice.name, choice.provenance, choice.reason) == ("first, second", "object", "asked for by name")


@pytest.mark.parametrize(
    ("name", "first", "message"),
    [
        (
            "first,second",
            {"refuses": refusing("no tide")},
            r"'first,second' passed in from Python refuses: first \(for prefill\): no tide",
        ),
        (
            "first,second",
            {"block_sizes": (64,)},
            "refuses: it reads KV blocks of 64 tokens, not 16; set cache.block_size",
        ),
        ("first,secnd", {}, r"there is no attention plugin 'secnd'; did you mean second\?"),
        ("first,auto", {}, "'first,auto' does not name two plugins; write it as PREFILL,DECODE"),
        ("first,", {}, "does not name two plugins"),
        ("first,second,first", {}, "does not name two plugins"),
    ],
)
def test_two_that_cannot_serve_are_refused(name: str, first: dict[str, Any], message: str) -> None:
    config, plugins = pair(name, **first)
    with pytest.raises(PluginError, match=message):
        resolve(config, plugins, CPU, {})


def test_other_extension_points_take_one_plugin() -> None:
    config = evolve(EngineConfig(), quant=QuantConfig(name="the-quant,the-quant"))
    with pytest.raises(PluginError, match="there is no quant plugin 'the-quant,the-quant'"):
        resolve(config, registry(), CPU, {})


def test_wrong_options_of_two_name_the_part() -> None:
    config, plugins = pair("first,second")
    config = evolve(config, attention=evolve(config.attention, options={"decode": {"split": 3}}))
    with pytest.raises(ConfigError, match=r"'first,second' passed in .*: attention.options.decode: there is no option"):
        resolve(config, plugins, CPU, {})


def test_options_reach_the_plugin_as_its_own_class() -> None:
    plugins = registry(("attention", "mine", concrete(AttentionBackend, options_class=Options), 1))
    config = evolve(
        EngineConfig(),
        attention=AttentionConfig(options={"splits": 3}),
        scheduler=SchedulerConfig(options={"splits": 4}),
    )
    parts = resolve(config, plugins, CPU, {})
    assert parts.options == {"attention": Options(3), "quant": None, "executors": None, "models": None}
    assert parts.policy.options == Options(4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": 3}, r"Python: attention.options: there is no option 'split'; did you mean splits\?"),
        ({"splits": "3"}, "attention 'mine' passed in from Python: attention.options.splits: expected a whole number"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    plugins = registry(("attention", "mine", concrete(AttentionBackend, options_class=Options), 1))
    with pytest.raises(ConfigError, match=message):
        resolve(evolve(EngineConfig(), attention=AttentionConfig(options=options)), plugins, CPU, {})


def test_refusal_of_an_option_names_file_plugin_and_version_when_the_option_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text("[attention.options]\nsplit = 3\n[quant.options]\nbits = 4\n")
    config = load_config(file).config
    installed = registry(("attention", "mine", concrete(AttentionBackend, options_class=Options), 1))
    info = PluginInfo(name="mine", entry_point="mine", distribution="my-dist", version="1.0")
    registrations = {name: evolve(one, plugin=info) for name, one in installed.attention.registrations.items()}
    installed.registries["attention"] = evolve(installed.attention, registrations=registrations)  # type: ignore[index]
    with pytest.raises(ConfigError, match=rf"^{file}: attention 'mine' of my-dist 1.0: attention.options: there is no"):
        resolve(evolve(config, quant=QuantConfig()), installed, CPU, {})
    with pytest.raises(ConfigError, match=rf"^{file}: quant 'the-quant' .*: quant.options has no options, but bits"):
        resolve(evolve(config, attention=AttentionConfig()), registry(), CPU, {})


def test_an_option_that_is_a_path_starts_from_the_directory_of_its_file_when_the_plugin_is_a_policy_of_auto(
    tmp_path: Path,
) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('[scheduler.options]\ntable = "lengths.json"\n')
    table = attrs.make_class("Table", {"table": attrs.field(type=Path)})
    policy = concrete(SchedulingPolicy, options_class=table, __init__=SchedulingPolicy.__init__)
    parts = resolve(load_config(file).config, registry(("schedulers", "mine", policy, 100)), CPU, {})
    assert parts.policy.options.table == tmp_path / "lengths.json"


def test_options_for_a_plugin_without_any_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"quant.options has no options, but bits was given"):
        resolve(evolve(EngineConfig(), quant=QuantConfig(options={"bits": 4})), registry(), CPU, {})


def test_classes_and_policies_can_be_passed_in() -> None:
    backend, policy = concrete(AttentionBackend), POLICY(Options(7))
    parts = resolve(EngineConfig(), registry(), CPU, {}, {"attention": backend, "scheduler": policy})
    assert parts.attention.__wrapped__ is backend
    assert parts.policy is policy
    [attention] = [choice for choice in parts.choices if choice.extension_point == "attention"]
    assert (attention.provenance, attention.reason) == ("object", "passed in from Python")
    by_class = resolve(EngineConfig(), registry(), CPU, {}, {"scheduler": POLICY})
    assert by_class.policy.options == Options()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"atention": 3}, r"no extension point 'atention'; did you mean attention\?"),
        ({"attention": dict}, "the attention passed in is .*not a subclass"),
        ({"attention": concrete(AttentionBackend)()}, "pass the class"),
        ({"scheduler": SchedulingPolicy}, "lacks order, victim"),
        ({"quant": concrete(QuantMethod, refuses=refusing("not here"))}, "refuses: not here"),
        ({"executor": concrete(Executor, api="7")}, "api = '7'"),
    ],
)
def test_what_is_passed_in_must_keep_the_contract(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        resolve(EngineConfig(), registry(), CPU, {}, overrides)


def raising(error: Exception) -> Any:
    def call(*arguments: Any) -> Any:
        raise error

    return call


def test_a_policy_that_cannot_be_made_is_named() -> None:
    faulty = concrete(SchedulingPolicy, __init__=raising(KeyError("tide")))
    with pytest.raises(
        PluginError, match=r"^scheduler 'Filled' passed in from Python failed in its constructor: KeyError: 'tide' "
    ):
        resolve(EngineConfig(), registry(), CPU, {}, {"scheduler": faulty})
    told = concrete(SchedulingPolicy, __init__=raising(ConfigError("give it a tide")))
    with pytest.raises(ConfigError, match=r"^give it a tide$"):
        resolve(EngineConfig(), registry(), CPU, {}, {"scheduler": told})


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (
            raising(KeyError("hidden_size")),
            PluginError,
            r"^model 'mine' .* failed in spec\(\): KeyError: 'hidden_size' .*read_key",
        ),
        (raising(CheckpointError("it lacks a key")), CheckpointError, "^it lacks a key$"),
        (
            lambda *_: {},
            PluginError,
            r"^model 'mine' .* answers spec\(\) with {}; it must be an engine.core.models.ModelSpec",
        ),
        (lambda *_: evolve(SHAPE, sliding_windows=()), PluginError, "sliding_windows of 0 layers for 2"),
    ],
)
def test_a_model_class_that_cannot_say_its_shape_is_named(spec: Any, error: type[Exception], message: str) -> None:
    offer = ("models", "mine", concrete(Model, refuses=refusing(None), spec=classmethod(spec)), 1)
    with pytest.raises(error, match=message):
        resolve(EngineConfig(), registry(offer), CPU, {})


@pytest.mark.parametrize("name", ["auto", "mine"])
def test_a_fault_of_the_model_is_named_before_the_quantization_method_refuses(name: str) -> None:
    mine = concrete(Model, refuses=refusing(None), spec=classmethod(raising(KeyError("hidden_size"))))
    plugins = registry(
        ("models", "mine", mine, 1), ("quant", "picky", concrete(QuantMethod, refuses=refusing("no")), 1)
    )
    config = evolve(EngineConfig(), model=ModelConfig(name=name), quant=QuantConfig(name="picky"))
    with pytest.raises(PluginError, match=r"^model 'mine' .* failed in spec\(\): KeyError: 'hidden_size'"):
        resolve(config, plugins, GPU, {})


def test_options_beside_a_finished_policy_are_not_ignored() -> None:
    config = evolve(EngineConfig(), scheduler=SchedulerConfig(options={"splits": 1}))
    with pytest.raises(ConfigError, match=r"scheduler.options is set"):
        resolve(config, registry(), CPU, {}, {"scheduler": POLICY(Options())})


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "device", "dtype"),
    [
        ("auto", {"dtype": "bfloat16"}, CPU, "float32"),
        ("auto", {"dtype": "bfloat16"}, GPU, "bfloat16"),
        ("auto", {"torch_dtype": "float16"}, GPU, "float16"),
        ("auto", {"dtype": None, "text_config": {"torch_dtype": "torch.bfloat16"}}, GPU, "bfloat16"),
        ("auto", {}, GPU, "float32"),
        ("float16", {"dtype": "bfloat16"}, GPU, "float16"),
        ("bfloat16", {}, CPU, "bfloat16"),
    ],
)
def test_auto_dtype_is_the_checkpoints_on_a_gpu_alone(
    wanted: str, checkpoint: dict[str, Any], device: DeviceInfo, dtype: str
) -> None:
    assert resolve_dtype(evolve(EngineConfig(), model=ModelConfig(dtype=wanted)), checkpoint, device) == dtype


def test_a_dtype_nobody_computes_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype is float8_e4m3fn; choose --dtype"):
        resolve_dtype(EngineConfig(), {"dtype": "float8_e4m3fn"}, GPU)


def test_graphs_that_an_instance_sets_must_be_among_those_there_are() -> None:
    backend, model = concrete(AttentionBackend)(), concrete(Model)()
    assert not use_graphs(EngineConfig(), backend, model, GPU)
    backend.graphs = "decode"
    assert use_graphs(EngineConfig(), backend, model, GPU)
    backend.graphs = "decodes"
    with pytest.raises(PluginError, match="Filled has set graphs = 'decodes'; it must be one of none, decode, any"):
        use_graphs(EngineConfig(), backend, model, GPU)


def test_max_len_beyond_the_models_is_refused() -> None:
    assert max_len(EngineConfig(), SHAPE) == 512
    assert max_len(evolve(EngineConfig(), model=ModelConfig(max_len=100)), SHAPE) == 100
    with pytest.raises(ConfigError, match=r"model.max_len \(--max-len\) is 513, but this model was made for 512"):
        max_len(evolve(EngineConfig(), model=ModelConfig(max_len=513)), SHAPE)


def test_the_attention_spec_says_what_the_model_asks() -> None:
    config = evolve(EngineConfig(), cache=CacheConfig(block_size=32))
    spec = attention_spec(SHAPE, config, "float16", 128, "bfloat16")
    assert (spec.dtype, spec.kv_dtype, spec.block_size, spec.max_len) == ("float16", "bfloat16", 32, 128)
    assert (spec.sliding_windows, spec.softcap, spec.scale) == ((None, 16), 30.0, 0.5)


FLOAT8 = "float8_e4m3fn"
OLD_GPU = DeviceInfo(type="cuda", capability=(8, 6))


@pytest.mark.parametrize(
    ("wanted", "asked", "device", "found"),
    [
        ("auto", None, GPU, "float16"),
        ("auto", FLOAT8, GPU, FLOAT8),
        ("auto", FLOAT8, CPU, FLOAT8),
        ("auto", FLOAT8, OLD_GPU, "float16"),
        ("float16", FLOAT8, GPU, "float16"),
        ("bfloat16", None, GPU, "bfloat16"),
        ("fp8", None, GPU, FLOAT8),
        (FLOAT8, None, OLD_GPU, FLOAT8),
    ],
)
def test_auto_kv_dtype_is_what_the_checkpoint_asks_for(
    wanted: str, asked: str | None, device: DeviceInfo, found: str
) -> None:
    stored: list[Any] = []
    quant = concrete(QuantMethod, kv_dtype=classmethod(lambda cls, config: stored.append(config) or asked))
    config = evolve(EngineConfig(), cache=CacheConfig(dtype=wanted))
    assert resolve_kv_dtype(config, "float16", {"quantization_config": {"bits": 8}}, quant, device) == found
    assert stored in ([], [{"bits": 8}])


def test_the_checkpoint_s_kv_dtype_is_what_attention_is_asked_for() -> None:
    asked: list[Any] = []
    quant = concrete(QuantMethod, kv_dtype=classmethod(lambda cls, config: FLOAT8))
    backend = concrete(AttentionBackend, refuses=classmethod(lambda cls, spec, device: asked.append(spec.kv_dtype)))
    reading = type("Reading", (backend,), {"reads_float8": True})
    plugins = registry(("attention", "old", backend, 2), ("attention", "new", reading, 1), ("quant", "q", quant, 1))
    parts = resolve(EngineConfig(), plugins, GPU, {})
    assert parts.attention.__wrapped__ is reading
    assert asked == [FLOAT8] * 3  # of the first cache group, and by the one that reads it of the second
    [choice] = [choice for choice in parts.choices if choice.extension_point == "attention"]
    assert "old refuses: it reads no KV cache in float8_e4m3fn; use --kv-dtype float32" in choice.reason


def test_max_len_may_exceed_the_trained_context_where_the_model_can_be_extended() -> None:
    spec = evolve(SHAPE, extended_max_len=1024)
    assert max_len(EngineConfig(), spec) == 512
    assert max_len(evolve(EngineConfig(), model=ModelConfig(max_len=1024)), spec) == 1024
    with pytest.raises(ConfigError, match="made for 1024 tokens; give at most 1024, or 0 for 512"):
        max_len(evolve(EngineConfig(), model=ModelConfig(max_len=1025)), spec)


def test_backend_without_sinks_is_not_given_a_model_that_has_them() -> None:
    spec = evolve(SHAPE, sinks=(True, False))
    old, new = concrete(AttentionBackend), concrete(AttentionBackend, reads_sinks=True)
    model = concrete(Model, spec=classmethod(lambda cls, config: spec))
    plugins = registry(("attention", "old", old, 2), ("attention", "new", new, 1), ("models", "m", model, 1))
    parts = resolve(EngineConfig(), plugins, GPU, {})
    assert parts.attention.__wrapped__ is new
    [choice] = [choice for choice in parts.choices if choice.extension_point == "attention"]
    assert "old refuses: it does not compute attention sinks, which this model has" in choice.reason


def test_auto_takes_a_model_with_latent_keys_only_where_a_backend_reads_them() -> None:
    cache = KVShape(num_heads=4, num_kv_heads=1, head_dim=12, value_head_dim=8, latent=True)
    latent = concrete(Model, spec=classmethod(lambda cls, config: evolve(SHAPE, layer_caches=(cache, cache))))
    reader, other = concrete(AttentionBackend, reads_latent=True), concrete(AttentionBackend)
    offers = [("models", "latent", latent, 2), ("models", "m", MODEL, 1), ("attention", "other", other, 2)]
    with_reader = registry(*offers, ("attention", "reader", reader, 1))
    assert resolve(EngineConfig(), with_reader, GPU, {}).model.__wrapped__ is latent
    named = evolve(EngineConfig(), attention=AttentionConfig(name="other"))
    for config, plugins in ((named, with_reader), (EngineConfig(), registry(*offers))):
        parts = resolve(config, plugins, GPU, {})
        assert parts.model.__wrapped__ is MODEL
        assert "latent refuses: its keys are latent, and" in chosen(parts, "models")[1]
    by_name = evolve(named, model=ModelConfig(name="latent"))
    with pytest.raises(PluginError, match="it reads no values of 8 numbers with keys of 12"):
        resolve(by_name, with_reader, GPU, {})


def test_a_latent_cache_in_float8_is_refused_for_a_backend_that_reads_both() -> None:
    cache = KVShape(num_heads=4, num_kv_heads=1, head_dim=12, value_head_dim=8, latent=True)
    latent = concrete(Model, spec=classmethod(lambda cls, config: evolve(SHAPE, layer_caches=(cache, cache))))
    reader = concrete(AttentionBackend, reads_latent=True, reads_float8=True)
    plugins = registry(("models", "latent", latent, 1), ("attention", "reader", reader, 1))
    config = evolve(EngineConfig(), model=ModelConfig(name="latent"), cache=CacheConfig(dtype="fp8"))
    with pytest.raises(PluginError, match="core writes no latent KV cache in float8_e4m3fn; use --kv-dtype float32"):
        resolve(config, plugins, CPU, {})


def test_find_quant_passes_over_methods_that_refuse() -> None:
    picky = concrete(QuantMethod, refuses=refusing("no"))
    other = concrete(QuantMethod)
    plugins = registry(("quant", "picky", picky, 2), ("quant", "other", other, 1))
    assert find_quant(EngineConfig(), plugins, GPU, {}).__wrapped__ is other
    with pytest.raises(PluginError, match="'picky' passed in from Python refuses: no"):
        find_quant(evolve(EngineConfig(), quant=QuantConfig(name="picky")), plugins, GPU, {})


@pytest.mark.parametrize(
    ("provenances", "expected"),
    [
        (("pluggable-llm-engine 0.1", "pluggable-llm-engine 0.1"), ""),
        (("engine-mine 0.4", "pluggable-llm-engine 0.1"), "; not built in: attention 'a,b' of engine-mine 0.4"),
        (
            ("pluggable-llm-engine 0 and mine 4", "object"),
            "; not built in: attention 'a,b' of pluggable-llm-engine 0 and mine 4, quant 'q' passed in from Python",
        ),
    ],
)
def test_parts_name_those_that_make_logits_and_are_not_built_in(provenances: tuple[str, str], expected: str) -> None:
    attention, quant = provenances
    made = (("attention", "a,b", attention), ("quant", "q", quant), ("schedulers", "s", "engine-fair 2"))
    choices = tuple(
        ChosenPlugin(extension_point=point, name=name, provenance=provenance, reason="named")
        for point, name, provenance in made
    )
    nothing: Any = None
    parts = Parts(
        attention=nothing, quant=nothing, policy=nothing, executor=nothing, model=nothing, options={}, choices=choices
    )
    assert parts.not_built_in == expected

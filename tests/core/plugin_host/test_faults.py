"""What a plugin raises by mistake while an engine starts names the plugin, the call and the original error."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

from engine.core.engine import Engine
from engine.core.errors import CheckpointError, ConfigError, EngineError, ExecutorError, PluginError, PluginFaultError
from engine.core.hooks import hookimpl
from engine.core.layers import Layer
from engine.core.layers.linear import PlainKernel
from engine.core.plugin_host import registry
from engine.core.plugin_host.faults import blame
from engine.core.plugin_host.load import load_plugins
from engine.core.runner.runner import Runner
from engine.core.runner.start_graphs import GraphStart
from engine.core.schedulers.policy import SchedulingPolicy
from engine.core.types import SamplingParams
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.executors.uniproc import UniprocExecutor
from engine.plugins.models.llama import Llama
from engine.plugins.quant.none import Unquantized

from .faulty import Odd, UnreadableError, offering, raising

MINE = "'mine' passed in from Python failed in"


def blamed(error: BaseException) -> None:
    with blame("attention 'mine' of mine 1.0", "plan()"):
        raise error


def test_a_mistake_names_plugin_call_error_and_place_and_keeps_the_cause() -> None:
    with pytest.raises(PluginFaultError) as caught:
        blamed(KeyError("tide"))
    assert str(caught.value).startswith("attention 'mine' of mine 1.0 failed in plan(): KeyError: 'tide' (")
    assert f"({__file__}, line {blamed.__code__.co_firstlineno + 2}); mend it" in str(caught.value)
    assert isinstance(caught.value, PluginError)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in blamed" in "".join(traceback.format_exception(caught.value.__cause__))


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("give it a tide"),
        CheckpointError("it lacks a key"),
        PluginError("no"),
        ExecutorError("gone"),
        MemoryError("no room"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_meant_and_lack_of_memory_pass_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        blamed(error)
    assert caught.value is error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(3), Odd(3)], ids=lambda error: type(error).__name__)
def test_what_a_plugin_raises_outside_exception_is_a_mistake_and_not_obeyed(error: BaseException) -> None:
    with pytest.raises(PluginFaultError, match=f"{type(error).__name__}: 3"):
        blamed(error)


def test_ctrl_c_in_a_plugin_is_obeyed() -> None:
    with pytest.raises(KeyboardInterrupt), blame("attention 'mine' of mine 1.0", "plan()"):
        signal.raise_signal(signal.SIGINT)


def test_an_exit_by_a_signal_handler_is_obeyed() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: sys.exit(4))
    try:
        with pytest.raises(SystemExit), blame("attention 'mine' of mine 1.0", "plan()"):
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_module_that_is_missing_is_to_be_installed() -> None:
    with pytest.raises(PluginFaultError, match=r"ModuleNotFoundError: .*; install what it needs"):
        blamed(ModuleNotFoundError("No module named 'tide'"))


def test_a_device_that_fails_is_no_mistake_of_the_plugin_but_it_is_named() -> None:
    with pytest.raises(ExecutorError, match=r"attention 'mine' of mine 1.0 failed in plan\(\): AcceleratorError"):
        blamed(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))


def test_an_error_without_a_readable_text_is_named_by_its_class() -> None:
    with pytest.raises(
        PluginFaultError, match=r"mine 1.0 failed in plan\(\): UnreadableError: an exception whose str\(\) raises V"
    ):
        blamed(UnreadableError())


def making(**members: Any) -> Any:
    """A `linear` that gives such a kernel."""
    kernel = type("Faulty", (PlainKernel,), members)
    return lambda self, spec: kernel(spec)


class Faulty(Layer):
    nbytes = 0

    def tensors(self) -> Any:
        return {}

    def fill(self, loaded: Any) -> None:
        raise KeyError("tide")


def with_layer(layer: Layer) -> Any:
    """A constructor of a model that has this layer too."""

    def make(self: Any, config: Any, layers: Any, options: Any = None) -> None:
        Llama.__init__(self, config, layers, options)
        layers.layers.append(layer)

    return make


@frozen
class Options:
    depth: int = 1

    def __attrs_post_init__(self) -> None:
        raise KeyError("tide")


class First(SchedulingPolicy):
    api = "1"

    def order(self, waiting: Any, now: Any) -> Any:
        return waiting

    def victim(self, running: Any) -> Any:
        return running[-1]


def first_time(executor: Any) -> bool:
    """As `shutdown` asks it too."""
    if not executor.asked:
        executor.asked = True
        raise KeyError("tide")
    return False


REFUSES = {"refuses": classmethod(raising())}
BASES = {
    "attention": TorchAttention,
    "quant": Unquantized,
    "scheduler": First,
    "executor": UniprocExecutor,
    "model": Llama,
}
FAULTS: list[tuple[str, dict[str, Any], str]] = [
    *((section, REFUSES, "refuses()") for section in BASES),
    *((section, {"options_class": Options}, "its options_class") for section in BASES),
    *((section, {"__init__": raising()}, "its constructor") for section in BASES if section != "quant"),
    ("quant", {"kv_dtype": classmethod(raising())}, "kv_dtype()"),
    ("quant", {"from_checkpoint": classmethod(raising())}, "from_checkpoint()"),
    ("quant", {"ignored": raising()}, "ignored()"),
    ("quant", {"kv_scales": raising()}, "kv_scales()"),
    ("quant", {"linear": raising()}, "linear() of model.layers.0."),
    ("quant", {"linear": making(__init__=raising())}, "linear() of model.layers.0."),
    ("quant", {"linear": making(fused_input_quantization=raising())}, "fused_input_quantization() of model.layers.0."),
    ("quant", {"linear": making(tensors=raising())}, "tensors() of model.layers.0."),
    ("quant", {"linear": making(prepare=raising())}, "prepare() of model.layers.0."),
    ("executor", {"watch": raising()}, "watch()"),
    ("executor", {"start": raising()}, "start()"),
    ("executor", {"asynchronous": property(first_time), "asked": False}, "asynchronous"),
    ("model", {"spec": classmethod(raising())}, "spec()"),
    ("model", {"__init__": with_layer(Faulty())}, "fill() of a layer"),
    ("model", {"__init__": with_layer(type("Nameless", (Faulty,), {"tensors": raising()})())}, "tensors() of a layer"),
]


def build(make_engine: Any, section: str, members: dict[str, Any]) -> Any:
    plugin = offering(section, type("Faulty", (BASES[section],), members))
    return make_engine(plugin, on_progress=lambda _: None, **{f"{section}__name": "mine"})


@pytest.mark.parametrize(
    ("section", "members", "call"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_whatever_is_called_at_start_up(make_engine: Any, section: str, members: dict[str, Any], call: str) -> None:
    with pytest.raises(PluginFaultError) as caught:
        build(make_engine, section, members)
    whose = {
        "start()": f"{section} 'mine' passed in from Python, or what it runs, failed in",
    }
    assert str(caught.value).startswith(f"{whose.get(call, f'{section} {MINE}')} {call}")
    assert "KeyError: 'tide'" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("section", "members"),
    [
        ("attention", {"__init__": raising(ConfigError("give it a tide"))}),
        ("attention", {"refuses": classmethod(raising(ConfigError("give it a tide")))}),
        ("quant", {"linear": raising(ConfigError("give it a tide"))}),
        ("quant", {"linear": making(prepare=raising(ConfigError("give it a tide")))}),
        ("model", {"__init__": raising(ConfigError("give it a tide"))}),
        ("executor", {"start": raising(ConfigError("give it a tide"))}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_a_plugin_says_itself_is_said(make_engine: Any, section: str, members: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^give it a tide$"):
        build(make_engine, section, members)


def test_auto_passes_over_one_that_says_why_in_an_error(make_engine: Any) -> None:
    class Plugin:
        @hookimpl
        def register_attention(self, register: Any) -> None:
            fussy = type("Fussy", (TorchAttention,), {"refuses": classmethod(raising(ConfigError("give it a tide")))})
            register("fussy", lambda: fussy, api="1", summary="", preference=99)

    [choice] = [one for one in make_engine(Plugin()).parts.choices if one.extension_point == "attention"]
    assert "fussy refuses: give it a tide" in choice.reason


WRONG_ANSWERS: list[tuple[str, dict[str, Any], str, str]] = [
    ("quant", {"from_checkpoint": classmethod(lambda cls, *_: None)}, "from_checkpoint()", "None"),
    ("quant", {"kv_dtype": classmethod(lambda cls, _: "tide")}, "kv_dtype()", "'tide'"),
    ("quant", {"ignored": lambda self: "*.tide"}, "ignored()", r"'\*.tide'"),
    ("quant", {"ignored": lambda self: [3]}, "ignored()", r"\[3\]"),
    ("quant", {"kv_scales": lambda self, _: 3}, "kv_scales()", "3"),
    ("quant", {"linear": lambda self, _: 3}, r"linear() of model.layers.0.self_attn.q_proj", "3"),
    (
        "quant",
        {"linear": making(fused_input_quantization=lambda self: 3)},
        "fused_input_quantization() of model.lay",
        "3",
    ),
    ("quant", {"linear": making(tensors=lambda self: None)}, "tensors() of model.layers.0.self_attn.q_proj", "None"),
    (
        "quant",
        {"linear": making(tensors=lambda self: {"x": 3})},
        "tensors() of model.layers.0.self_attn.q_proj",
        "{'x': 3}",
    ),
    ("quant", {"linear": making(prepare=lambda self, _: None)}, "prepare() of model.layers.0.self_attn.q_proj", "None"),
    (
        "quant",
        {"linear": making(prepare=lambda self, _: {"x": 3})},
        "prepare() of model.layers.0.self_attn.q_p",
        "{'x': 3}",
    ),
    ("executor", {"asynchronous": property(lambda self: None)}, "asynchronous", "None"),
    ("executor", {"start": lambda self: None}, "start()", "None"),
]


@pytest.mark.parametrize(("section", "members", "call", "answer"), WRONG_ANSWERS, ids=lambda value: str(value)[:30])
def test_start_names_the_plugin_that_answers_a_start_up_call_wrongly(
    make_engine: Any, section: str, members: dict[str, Any], call: str, answer: str
) -> None:
    expected = rf"^{section} 'mine' passed in from Python returned {answer} from {re.escape(call)}.*, not .*; mend it"
    with pytest.raises(PluginError, match=expected):
        build(make_engine, section, members)


CONSTRUCTORS = [
    ("attention", {"__init__": raising()}, "its constructor"),
    ("quant", {"from_checkpoint": classmethod(raising())}, "from_checkpoint()"),
    ("scheduler", {"__init__": raising()}, "its constructor"),
    ("executor", {"__init__": raising()}, "its constructor"),
    ("model", {"__init__": raising()}, "its constructor"),
]


@pytest.mark.parametrize(("section", "members", "call"), CONSTRUCTORS, ids=lambda value: str(value)[:12])
def test_auto_passes_over_a_plugin_whose_constructor_raises_and_says_so(
    make_engine: Any, section: str, members: dict[str, Any], call: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(offering(section, type("Faulty", (BASES[section],), members), preference=99))
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].token_ids
    names = {"scheduler": "schedulers", "executor": "executors", "model": "models"}
    [choice] = [one for one in engine.parts.choices if one.extension_point == names.get(section, section)]
    assert choice.name != "mine"
    assert f"{section} {MINE} {call}: KeyError: 'tide'" in choice.reason
    passes = [one for one in caplog.records if "auto passes over" in one.getMessage()]
    assert len(passes) == (section != "scheduler")


def test_the_fault_is_raised_where_auto_has_no_other_plugin(engine_checkpoint: Any) -> None:
    class Sole(TorchAttention):
        __init__ = raising()

    plugins = load_plugins(extra=[offering("attention", Sole, preference=99)])
    registry = plugins.registries["attention"]
    only = evolve(registry, registrations={"mine": registry.registrations["mine"]})
    plugins = evolve(plugins, registries={**plugins.registries, "attention": only})
    with pytest.raises(PluginFaultError, match=rf"^attention {MINE} its constructor: KeyError: 'tide'"):
        Engine(str(engine_checkpoint), plugins=plugins, cache__memory="8MiB", executor__device="cpu")


def test_a_class_that_was_passed_in(make_engine: Any) -> None:
    faulty = type("Faulty", (TorchAttention,), {"__init__": raising()})
    with pytest.raises(PluginFaultError, match=r"^attention 'Faulty' passed in from Python failed in its constructor"):
        make_engine(attention=faulty)


def test_what_several_do_together_names_all(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        GraphStart, "capture", raising(RuntimeError("operation not permitted when stream is capturing"))
    )
    told = r"^model 'llama' of .*, attention '\w+' of .* or quant 'none' of .* failed in the capture of CUDA graphs: "
    with pytest.raises(PluginFaultError, match=told):
        make_engine()


def test_what_an_executor_runs_is_not_its_own_mistake(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "start", raising(OSError("the disk is gone")))
    told = r"^executor 'uniproc' of .*, or what it runs, failed in start\(\): OSError: the disk is gone .*--debug"
    with pytest.raises(PluginFaultError, match=told):
        make_engine()


@pytest.mark.parametrize("name", ["engine_started", "engine_stopped"])
@pytest.mark.parametrize(
    "error", [KeyError("tide"), SystemExit(3), ConfigError("tide"), Odd()], ids=lambda error: type(error).__name__
)
def test_an_observing_hook_that_fails_is_logged_and_the_engine_goes_on(
    make_engine: Any, name: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    called = []

    def plugin(title: str, hook: Callable[..., None]) -> Any:
        return type(title, (), {name: staticmethod(hookimpl(hook))})()

    def fail(engine: Any) -> None:
        raise error

    def note(engine: Any) -> None:
        called.append(engine)

    engine = make_engine(plugin("Other", note), plugin("Listener", fail))
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].token_ids
    engine.close()
    assert called == [engine]
    [record] = [one for one in caplog.records if "only observes" in one.getMessage()]
    assert record.getMessage().startswith(f"plugin 'Listener' of object failed in {name}()")
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.parametrize("name", ["engine_started", "engine_stopped"])
def test_an_observing_hook_that_does_not_return_is_named_while_it_is_waited_for(
    make_engine: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "SLOW_HOOK_SECONDS", 0.01)
    expected = f"plugin 'Listener' of object has been in {name}() for 0.01 s, which holds up the engine until"
    seen = []

    def hang(engine: Any) -> None:
        deadline = time.monotonic() + 30
        while not any(expected in message for message in caplog.messages) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(engine)

    engine = make_engine(type("Listener", (), {name: staticmethod(hookimpl(hang))})())
    engine.close()
    assert seen == [engine]
    assert len([message for message in caplog.messages if expected in message]) == 1


def test_an_observing_hook_is_called_when_no_thread_can_be_started(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called = []

    def note(engine: Any) -> None:
        called.append(engine)

    engine = make_engine(type("Listener", (), {"engine_stopped": staticmethod(hookimpl(note))})())
    monkeypatch.setattr(threading.Timer, "start", raising(RuntimeError("can't create new thread at shutdown")))
    engine.close()
    assert called == [engine]
    assert not [message for message in caplog.messages if "only observes" in message]


@pytest.mark.usefixtures("tidal")
def test_a_distribution_is_named_with_its_version(make_engine: Any) -> None:
    told = (
        r"^attention 'tidal' of engine-tidal 0.4 failed in its constructor: KeyError: 'tide' \(.*engine_tidal_module.py"
    )
    with pytest.raises(EngineError, match=told):
        make_engine(attention="tidal")

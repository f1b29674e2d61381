"""A plugin that fails in a step, or returns what its contract does not allow, is named with its method and line."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core.errors import ExecutorError, StepFaultError
from engine.core.executors.base import Health
from engine.core.layers.linear import PlainKernel
from engine.core.plugin_host.faults import PluginCall, name_fault
from engine.core.types import SamplingParams
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.executors.uniproc import UniprocExecutor
from engine.plugins.models.llama import Llama
from engine.plugins.quant.none import Unquantized

from .faulty import Odd, UnreadableError, offering, raising

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


ERRORS = [
    KeyError("tide"),
    RuntimeError("could not create a primitive descriptor for the tide\nwith more lines\n" + "x" * 2000),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    SystemExit(3),
    KeyboardInterrupt(),
    Odd("tide"),
]


class Kernel(PlainKernel):
    """Not core's own kernel: a plugin's."""

    apply: Any

    @classmethod
    def method(cls, **members: Any) -> Any:
        """A `linear` that makes kernels with these members."""
        kernel = type("Mine", (cls,), members)
        return lambda self, spec: kernel(spec)


LINE = raising.__code__.co_firstlineno + 4


def answering(answer: Callable[..., Any]) -> Callable[..., Any]:
    """A method with this answer, whatever it is called with."""
    return lambda self, *arguments, **named: answer(*arguments)


BASES: dict[str, type] = {
    "attention": TorchAttention,
    "quant": Unquantized,
    "executor": UniprocExecutor,
    "model": Llama,
}


def build(make_engine: Any, section: str, members: dict[str, Any]) -> Any:
    plugin = offering(section, type("Faulty", (BASES[section],), members))
    return make_engine(plugin, **{f"{section}__name": "mine"})


METHODS = [
    ("attention", "plan", "plan()"),
    ("attention", "forward", "forward() of layer 0"),
    ("quant", "apply", "apply() of model.layers.0.self_attn.q_proj"),
    ("executor", "submit", "submit()"),
    ("executor", "check", "check()"),
    ("model", "forward", "forward()"),
    ("model", "logits", "logits()"),
]


@pytest.mark.parametrize(("section", "method", "call"), METHODS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_start_names_the_plugin_that_raises_in_a_step(
    make_engine: Any, section: str, method: str, call: str, error: BaseException
) -> None:
    members: dict[str, Any] = {method: raising(error)}
    if section == "quant":
        members = {"linear": Kernel.method(**members)}
    with pytest.raises(StepFaultError) as caught:
        build(make_engine, section, members)
    text = str(error).partition("\n")[0]
    shown = type(error).__name__ + (f": {text}" if text else "")
    place = f"tests/core/plugin_host/faulty.py, line {LINE}"
    assert str(caught.value) == f"{section} 'mine' passed in from Python failed in {call}: {shown} ({place})"
    assert caught.value.__cause__ is error


def test_start_names_the_plugin_whose_error_has_no_readable_text(make_engine: Any) -> None:
    wanted = r"^attention 'mine' passed in from Python failed in plan\(\): UnreadableError: an exception whose str\(\)"
    with pytest.raises(StepFaultError, match=wanted):
        build(make_engine, "attention", {"plan": raising(UnreadableError())})


def wrong(section: str, method: str, answer: Callable[..., Any], message: str) -> Any:
    return pytest.param(section, method, answer, message, id=f"{section}-{method}-{message[:40]}")


META = torch.device("meta")
WRONG = [
    wrong("attention", "forward", lambda layer, q, *_: None, r"forward\(\) of layer 0: None, not a tensor of \["),
    wrong("attention", "forward", lambda layer, q, *_: [1], r"forward\(\) of layer 0: an object of class list, not a"),
    wrong(
        "attention", "forward", lambda layer, q, *_: q[:, :1], r"a tensor of \[\d+, 1, 16\] float32 on cpu, not of \["
    ),
    wrong(
        "attention", "forward", lambda layer, q, *_: q.flatten(1), r"a tensor of \[\d+, \d+\] float32 on cpu, not of"
    ),
    wrong("attention", "forward", lambda layer, q, *_: q.double(), r"float64 on cpu, not of \[.*\] float32 on cpu"),
    wrong("attention", "forward", lambda layer, q, *_: q.to(META), r"float32 on meta, not of \[.*\] float32 on cpu"),
    wrong("quant", "apply", lambda x, *_: None, r"apply\(\) of model.layers.0.self_attn.q_proj: None, not a tensor"),
    wrong("quant", "apply", lambda x, *_: x[..., :3], r"apply\(\) of model.*q_proj: a tensor of \[\d+, 3\] float32"),
    wrong("quant", "apply", lambda x, *_: x.half(), r"apply\(\) of model.*q_proj: a tensor of .* float16 on cpu, not"),
    wrong("quant", "apply", lambda x, *_: x.to(META), r"apply\(\) of model.*q_proj: a tensor of .* on meta, not"),
    wrong("model", "forward", lambda run: None, r"forward\(\): None, not a tensor of \[\d+, 64\] float32 on cpu"),
    wrong("model", "forward", lambda run: run.batch.tokens, r"forward\(\): a tensor of \[\d+\] int64 on cpu, not of"),
    wrong("model", "logits", lambda hidden: hidden, r"logits\(\): a tensor of \[1, 64\] float32 on cpu, not of \[1, "),
    wrong("model", "logits", lambda hidden: "tide", r"logits\(\): an object of class str, not a tensor of \[1, "),
    wrong("executor", "submit", lambda step: None, r"submit\(\): None, not an object with the methods done\(\) and re"),
    wrong("executor", "check", lambda: "fine", r"check\(\): 'fine', not a Health"),
    *(
        wrong(
            "executor",
            "submit",
            lambda step, result=result: SimpleNamespace(done=lambda: True, result=lambda: result),
            rf"result\(\): .*, not {wanted}",
        )
        for result, wanted in (
            (None, "a StepResult"),
            (Health(ok=True), "a StepResult"),
        )
    ),
    wrong(
        "executor", "submit", lambda step: SimpleNamespace(done=lambda: 3, result=lambda: 3), r"done\(\): 3, not True"
    ),
]


@pytest.mark.parametrize(("section", "method", "answer", "message"), WRONG)
def test_start_names_the_plugin_that_returns_a_wrong_result(
    make_engine: Any, section: str, method: str, answer: Callable[..., Any], message: str
) -> None:
    members: dict[str, Any] = {method: answering(answer)}
    if section == "quant":
        members = {"linear": Kernel.method(**members)}
    expected = rf"^{section} 'mine' passed in from Python returned a wrong result from .*{message}"
    with pytest.raises(StepFaultError, match=expected):
        build(make_engine, section, members)


@pytest.mark.parametrize(
    ("section", "method", "plain"),
    [
        ("attention", "plan", TorchAttention.plan),
        ("attention", "forward", TorchAttention.forward),
        ("quant", "apply", PlainKernel.apply),
        ("executor", "submit", UniprocExecutor.submit),
        ("model", "forward", Llama.forward),
    ],
)
@pytest.mark.parametrize("error", [KeyError("tide"), SystemExit(3)], ids=lambda error: type(error).__name__)
def test_a_fault_in_a_later_step_is_named_without_a_wrapper(
    make_engine: Any, section: str, method: str, plain: Any, error: BaseException
) -> None:
    broken = []

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if broken:
            raise error.with_traceback(None)
        return plain(self, *arguments, **named)

    members: dict[str, Any] = {method: call}
    if section == "quant":
        members = {"linear": Kernel.method(**members)}
    engine = build(make_engine, section, members)
    assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids
    broken.append(True)
    with pytest.raises(StepFaultError) as caught:
        engine.generate([[1, 2, 4]], GREEDY)
    assert str(caught.value).startswith(f"{section} 'mine' passed in from Python failed in {method}()")
    assert f"test_step_faults.py, line {call.__code__.co_firstlineno + 2})" in str(caught.value)
    assert caught.value.__cause__ is error


def test_an_error_of_torch_inside_a_plugin_names_the_line_of_the_plugin(make_engine: Any) -> None:
    def forward(self: Any, layer: int, q: Any, k: Any, v: Any, plan: Any) -> Any:
        return torch.nn.functional.linear(q, q.new_zeros(3, 5))

    with pytest.raises(StepFaultError) as caught:
        build(make_engine, "attention", {"forward": forward})
    told = r"^attention 'mine' .* in forward\(\) of layer 0: RuntimeError: .* \(.*test_step_faults.py, line (\d+)\)$"
    [line] = re.findall(told, str(caught.value))
    assert int(line) == forward.__code__.co_firstlineno + 1


def test_a_method_with_other_arguments_than_the_contract_s_is_named(make_engine: Any) -> None:
    with pytest.raises(StepFaultError, match=r"^attention 'mine' .* failed in forward\(\) of layer 0: TypeError: "):
        build(make_engine, "attention", {"forward": lambda self, q: q})


def test_a_built_in_plugin_that_fails_is_named_with_the_third_party_s_model_that_called_it(make_engine: Any) -> None:
    def forward(self: Any, run: Any) -> Any:
        return run.attention.forward(0, None, None, None, run.plan)

    expected = (
        r"^attention '\w+' of pluggable-llm-engine \S+ failed in forward\(\) of layer 0: \w+: .*plugins/attention/.*"
        r", called by model 'mine' passed in from Python in forward\(\) \(.*test_step_faults.py, line \d+\)$"
    )
    with pytest.raises(StepFaultError, match=expected):
        build(make_engine, "model", {"forward": forward})


@pytest.mark.parametrize(
    "error", [ExecutorError("gone"), MemoryError("no room")], ids=lambda error: type(error).__name__
)
def test_name_fault_returns_for_what_is_no_fault(error: BaseException) -> None:
    name_fault(error, PluginCall("attention 'mine'", "plan()"))


def test_name_fault_returns_where_no_plugin_ran() -> None:
    try:
        raise KeyError("tide")
    except KeyError as error:
        name_fault(error)


class Caller:
    """A plugin's object whose method calls a function."""

    def __init__(self, calls: Callable[[], object]) -> None:
        self.calls = calls

    def forward(self) -> None:
        self.calls()


@pytest.mark.parametrize(
    ("owner", "end"),
    [
        ("model 'llama' of pluggable-llm-engine 0.1", "; not built in: quant 'mine' of engine-mine 0.4"),
        ("model 'mine' of engine-mine 0.4", ""),
    ],
)
def test_name_fault_says_what_is_not_built_in_when_only_built_in_plugins_ran(owner: str, end: str) -> None:
    caller = type("Model", (Caller,), {"plugin_owner": owner})(lambda: 1 / 0)
    try:
        caller.forward()
    except ZeroDivisionError as error:
        with pytest.raises(StepFaultError) as caught:
            name_fault(error, not_built_in="; not built in: quant 'mine' of engine-mine 0.4")
    assert str(caught.value).startswith(f"{owner} failed in forward(): ZeroDivisionError: division by zero (")
    assert str(caught.value).rpartition(")")[2] == end


@pytest.mark.parametrize(("kind", "text"), [(MemoryError, ""), (torch.OutOfMemoryError, "CUDA out of memory")])
def test_name_fault_says_once_which_plugin_raised_when_memory_lacks(kind: type[BaseException], text: str) -> None:
    def run_out() -> None:
        raise kind(*[text] * bool(text))

    caller = type("Backend", (Caller,), {"plugin_owner": "attention 'mine' of mine 4"})(run_out)
    with pytest.raises(kind) as caught:
        caller.forward()
    for _ in range(2):
        name_fault(caught.value)
    said = r"raised by attention 'mine' of mine 4 in forward\(\) \(.*test_step_faults.py, line \d+\)"
    assert re.fullmatch(f"{text}; {said}" if text else said, str(caught.value))


def test_checks_leave_nothing_between_core_and_plugin_after_the_rehearsal(make_engine: Any) -> None:
    kernel = type("Mine", (Kernel,), {})
    plugins = [
        offering("attention", type("Faulty", (TorchAttention,), {})),
        offering("quant", type("Faulty", (Unquantized,), {"linear": lambda self, spec: kernel(spec)})),
        offering("model", type("Faulty", (Llama,), {})),
    ]
    engine = make_engine(*plugins, attention="mine", quant="mine", model__name="mine")
    state = engine._executor._runner._launcher.state
    for made, base in ((state.attention, TorchAttention), (state.model, Llama)):
        for method in ("plan", "forward", "forward_into", "logits", "greedy"):
            assert getattr(type(made), method, None) is getattr(base, method, None)
    linear = state.model._blocks[0][0].attention._qkv
    assert linear._apply == linear.kernel.apply
    assert engine._executor._runner._launch == engine._executor._runner._launcher.launch

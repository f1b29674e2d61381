"""Checks of what models and attention backends return in calls that a CPU's rehearsal does not make."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.core.attention.pair import AttentionPair
from engine.core.errors import StepFaultError
from engine.core.models.base import ModelSpec
from engine.core.plugin_host.guard import guarded
from engine.core.plugin_host.result_checks import ResultChecks

SPEC = ModelSpec(
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    hidden_size=4,
    vocab_size=7,
    max_len=8,
    sliding_windows=(None,),
    scale=1.0,
)
HIDDEN = torch.zeros(3, 4)


class Plugin:
    """A model or a backend that returns what it is given."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def forward(self, *arguments: Any) -> Any:
        return self.answer

    logits = greedy = forward_into = rotate_and_forward = forward


def model(answer: object, checks: ResultChecks) -> Any:
    return checks.model(guarded(Plugin, "model 'mine' of mine 1.0", ()), SPEC, "float32")(answer)


def test_greedy_passes_the_max_logits_and_tokens_of_each_row() -> None:
    right = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    assert model(right, ResultChecks()).greedy(HIDDEN) is right


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "None, not a pair of the max logits and their tokens"),
        (torch.zeros(2, 3), r"a tensor of \[2, 3\] float32 on cpu, not a pair"),
        ((torch.zeros(3), torch.zeros(3)), r"as tokens: a tensor of \[3\] float32 on cpu, not of \[3\] int64 on cpu"),
        (
            (torch.zeros(3).half(), torch.zeros(3)),
            r"as max logits: a tensor of \[3\] float16 on cpu, not of \[3\] float32",
        ),
        ((torch.zeros(3, 1), torch.zeros(3)), r"as max logits: a tensor of \[3, 1\] float32"),
    ],
)
def test_greedy_refuses_what_the_contract_does_not_allow(answer: object, message: str) -> None:
    expected = rf"^model 'mine' of mine 1.0 returned a wrong result from greedy\(\): {message}"
    with pytest.raises(StepFaultError, match=expected):
        model(answer, ResultChecks()).greedy(HIDDEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_may_have_any_type_of_floats(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 7, dtype=dtype)
    assert model(logits, ResultChecks()).logits(HIDDEN) is logits


def test_forward_into_refuses_a_result_that_would_be_ignored() -> None:
    backend = ResultChecks().attention(guarded(Plugin, "attention 'mine' of mine 1.0", ()))
    expected = r"from forward_into\(\) of layer 2: a tensor of \[3, 4\] float32 on cpu, which is ignored; write"
    with pytest.raises(StepFaultError, match=expected):
        backend(HIDDEN).forward_into(2, HIDDEN, HIDDEN, HIDDEN, None, HIDDEN)
    assert backend(None).forward_into(2, HIDDEN, HIDDEN, HIDDEN, None, HIDDEN) is None


def test_both_backends_of_a_pair_are_checked_until_the_end() -> None:
    checks = ResultChecks()
    classes: Any = [guarded(Plugin, f"attention {name!r} of mine 1.0", ()) for name in ("first", "second")]
    pair = checks.attention(AttentionPair(("first", "second"), (classes[0], classes[1])))
    for name, part in zip(("first", "second"), pair.parts, strict=True):
        with pytest.raises(StepFaultError, match=rf"^attention '{name}' of mine 1.0 returned a wrong result"):
            part(None).forward(0, HIDDEN, HIDDEN, HIDDEN, None)
    checks.end()
    assert [part(3).forward(0, HIDDEN, HIDDEN, HIDDEN, None) for part in pair.parts] == [3, 3]
    assert all(part.forward is Plugin.forward for part in pair.parts)

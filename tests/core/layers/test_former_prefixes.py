from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from engine.core.layers import LayerFactory
from engine.core.layers.former_prefixes import FormerPrefixes, best_answer
from engine.core.quant import ExpertsKernel, ExpertsSpec, KVScaleNames, LinearKernel, LinearSpec, QuantMethod

FORMER = {"model.text.": "text.model.", "lm_head.": "text.lm_head."}


@pytest.mark.parametrize(
    ("present", "stored"),
    [
        ("model.text.norm.weight", "text.model.norm.weight"),
        ("model.text.layers.0", "text.model.layers.0"),
        ("lm_head", "text.lm_head"),
        ("lm_head.weight", "text.lm_head.weight"),
        ("model.vision.weight", "model.vision.weight"),
    ],
)
def test_former_prefixes_translate_names_both_ways(present: str, stored: str) -> None:
    prefixes = FormerPrefixes(FORMER, ["text.model.norm.weight", "text.lm_head.weight", "model.vision.weight"])
    assert prefixes.stored(present) == stored
    assert prefixes.stored(stored) == stored
    assert prefixes.present(stored) == present


@pytest.mark.parametrize("names", [["text.model.a.weight", "model.text.b.weight"], ["model.text.b.weight"], []])
def test_former_prefix_does_not_count_where_names_have_the_present_one(names: Sequence[str]) -> None:
    assert FormerPrefixes(FORMER, names).stored("model.text.a.weight") == "model.text.a.weight"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([("file", "missing")], ("file", "missing")),
        ([("file", "there"), ("present", "there")], ("file", "there")),
        ([("file", "missing"), ("present", "there")], ("present", "there")),
        ([("file", None), ("present", "there")], ("present", "there")),
        ([("file", "missing"), ("present", None)], ("present", None)),
        ([("file", None), ("present", None)], ("file", None)),
        ([("file", "missing"), ("present", "missing")], ("file", "missing")),
    ],
)
def test_best_answer_is_the_one_whose_tensors_are_there(answers: Any, expected: Any) -> None:
    specs = [spec for spec, _ in answers]
    assert best_answer(specs, dict(answers).get, lambda _, kernel: kernel == "there") == expected


def test_best_answer_asks_by_the_second_name_only_where_the_first_answer_may_be_wrong() -> None:
    asked: list[str] = []
    best_answer(["file", "present"], asked.append, lambda _, kernel: True)
    assert asked == ["file", "present"]
    asked.clear()

    def ask(name: str) -> Any:
        asked.append(name)
        return "there"

    assert best_answer(["file", "present"], ask, lambda _, kernel: True) == ("file", "there")
    assert asked == ["file"]


class Recorder(QuantMethod[None]):
    """Quantizes nothing, and records the names that it is asked for."""

    api: ClassVar[str] = "2"

    def __init__(self) -> None:
        self.asked: list[str] = []

    @classmethod
    def refuses(cls, checkpoint: Any, device: Any) -> str | None:
        return None

    @classmethod
    def from_checkpoint(cls, checkpoint: Any, options: None) -> Recorder:
        return cls()

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        self.asked += [part.stored_name for part in spec.parts]
        return None

    def lm_head(self, spec: LinearSpec) -> LinearKernel | None:
        return self.linear(spec)

    def experts(self, spec: ExpertsSpec) -> ExpertsKernel | None:
        self.asked.append(spec.name)
        return None

    def kv_scales(self, attention: str) -> KVScaleNames | None:
        self.asked.append(attention)
        return None


@pytest.mark.parametrize("prefix", ["text.model.", "model.text."])
def test_quantization_method_is_asked_by_the_names_of_the_checkpoint_first(prefix: str) -> None:
    experts = f"{prefix}mlp.experts"
    head = "text.lm_head" if prefix == "text.model." else "lm_head"
    stored = [f"{experts}.gate_up_proj", f"{experts}.down_proj", f"{prefix}qkv.weight", f"{head}.weight"]
    quant = Recorder()
    layers = LayerFactory(dtype="float32", device="cpu", quant=quant, stored=stored)
    for present, former in FORMER.items():
        layers.accept_prefix(present, former)
    layers.linear([("model.text.q", 8), ("model.text.k", 8)], 8, parallel="column", stored="model.text.qkv")
    assert quant.asked[0] == f"{prefix}qkv"
    quant.asked.clear()
    layers.lm_head("lm_head", 16, 8)
    assert quant.asked[0] == head
    quant.asked.clear()
    made = layers.experts("model.text.mlp.experts", 8, 8, 2, 1)
    assert quant.asked[0] == made.spec.name == experts
    assert made.spec.stacked
    quant.asked.clear()
    layers.attention(0, 2, 2, 4, name="model.text.attention")
    assert quant.asked == [f"{prefix}attention"]
    assert layers.stores_tensor("model.text.qkv.weight")
    assert layers.stores("model.text.qkv")

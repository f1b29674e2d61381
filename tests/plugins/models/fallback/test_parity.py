"""The plugin `transformers` against the library's own results: logits in mixed batches, greedy tokens, ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.core import Engine, SamplingParams
from engine.core.layers import Linear
from engine.core.models import Model
from engine.plugins.models.llama import Llama
from engine.plugins.models.transformers import Transformers
from engine.testing.checkpoints import make_checkpoint
from engine.testing.model_bench import ModelBench
from engine.testing.ranks import run_ranks
from tests.plugins.models.fallback.checkpoints import ARCHITECTURES

PROMPTS = [[(7 * index + 3 * index * index) % 500 for index in range(length)] for length in (60, 37)]
BATCHES = ([(0, 0, 20), (1, 0, 30)], [(1, 30, 1), (0, 20, 39)], [(0, 59, 1), (1, 31, 1)], [(1, 32, 5)])
"""(sequence, first token, number of tokens): chunks and single tokens side by side."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param, **ARCHITECTURES[request.param])


def library_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    library: Any = AutoModelForCausalLM
    return library.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def mixed_logits(bench: ModelBench) -> list[torch.Tensor]:
    """Logits of both prompts, computed in BATCHES."""
    found: list[list[torch.Tensor]] = [[], []]
    for batch in BATCHES:
        parts = bench.logits(batch).split([count for _, _, count in batch])
        for (sequence, _, _), part in zip(batch, parts, strict=True):
            found[sequence].append(part)
    return [torch.cat(parts) for parts in found]


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_logits_and_greedy_tokens_equal_the_librarys_in_mixed_batches(checkpoint: Path) -> None:
    model = library_model(checkpoint)
    bench = ModelBench(Transformers, checkpoint, PROMPTS)
    for prompt, ours in zip(PROMPTS, mixed_logits(bench), strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt]), use_cache=False).logits[0]
        assert difference(ours, theirs) < 1e-5
    with torch.inference_mode():
        hidden = bench.hidden([(0, 0, 60)])
        max_logits, tokens = bench.model.greedy(hidden)
        logits = bench.model.logits(hidden)
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(max_logits, logits.max(-1).values)


def test_an_engine_takes_the_fallback_by_auto_and_generates_the_librarys_tokens(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "gpt_neox", tokenizer=True, **ARCHITECTURES["gpt_neox"])
    model = library_model(directory)
    wanted = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        tokens = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=None,
            pad_token_id=0,
        )
        wanted.append(tokens[0, len(prompt) :].tolist())
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with Engine(model=str(directory), executor__device="cpu", cache__memory="8MiB", model__dtype="float32") as engine:
        found = [list(completion.token_ids) for completion in engine.generate(PROMPTS, greedy)]
        [chosen] = [choice for choice in engine.parts.choices if choice.extension_point == "models"]
    assert found == wanted
    assert chosen.name == "transformers"


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_two_ranks_compute_what_one_computes(tmp_path: Path, architecture: str) -> None:
    directory = make_checkpoint(tmp_path, architecture, pad_token_id=0)
    whole = ModelBench(Transformers, directory, PROMPTS).logits([(0, 0, 40), (1, 0, 20)])

    def shard(group: Any) -> tuple[torch.Tensor, int]:
        bench = ModelBench(Transformers, directory, PROMPTS, group=group)
        return bench.logits([(0, 0, 40), (1, 0, 20)]), bench.layers.nbytes

    for logits, nbytes in run_ranks(2, shard):
        assert difference(logits, whole) < 1e-5
        assert nbytes < 0.7 * sum(file.stat().st_size for file in directory.glob("*.safetensors"))


class CountedOperations(TorchDispatchMode):
    """Counts the operations that compute or copy."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operations(model: type[Model], directory: Path) -> int:
    """Operations of one decode step."""
    bench = ModelBench(model, directory, PROMPTS)
    bench.hidden([(0, 0, 8)])
    with CountedOperations() as counted:
        bench.hidden([(0, 8, 1)])
    return counted.count


def test_a_recognized_decoder_costs_as_many_operations_a_layer_as_a_native_one(tmp_path: Path) -> None:
    counts = {}
    for layers in (1, 3):
        directory = make_checkpoint(tmp_path / str(layers), "llama", num_hidden_layers=layers)
        counts[layers] = [operations(model, directory) for model in (Llama, Transformers)]
    native, fallback = (more - few for more, few in zip(counts[3], counts[1], strict=True))
    assert fallback == native > 0


def test_recognized_modules_are_the_layers_of_a_native_model(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3")
    bench = ModelBench(Transformers, directory, PROMPTS)
    linears = [layer for layer in bench.layers.layers if isinstance(layer, Linear)]
    names = [[part.name.rpartition(".")[2] for part in linear.spec.parts] for linear in linears]
    assert names == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]] * 2
    assert [linear.spec.gated for linear in linears] == [False, False, True, False] * 2

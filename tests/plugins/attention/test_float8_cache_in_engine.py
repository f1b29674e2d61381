"""Whole engines with keys and values in float8, against one that rounds them by hand and keeps them in float32."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import attrs
import pytest
import torch
import triton
from safetensors.torch import load_file, save_file

from engine.core import Engine, SamplingParams
from engine.core.attention.kv_pool import KVPool
from engine.core.errors import CheckpointError, PluginError
from engine.plugins.attention.triton import TritonAttention
from engine.testing.checkpoints import make_checkpoint

PROMPTS = [[(11 * row + 5 * column) % 500 for column in range(3 + 17 * row)] for row in range(3)]
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
CACHE_ALONE = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
SCALES = {0: (0.013, 0.004), 1: (0.0071, 0.021)}
"""Of keys and values by layer; some numbers are cut off."""
NUMBERS = torch.tensor(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
)
"""Of float8 (e4m3) by code, from 0 to 448."""


class InterpretedTriton(TritonAttention):
    """On a CPU, by Triton's interpreter."""

    @classmethod
    def refuses(cls, spec: Any, device: Any) -> Any:
        return super().refuses(spec, attrs.evolve(device, type="cuda"))


def rounded(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    """The nearest number that has a code, times its scale."""
    code = ((numbers / scale).abs()[..., None] - NUMBERS).abs().argmin(-1)
    return NUMBERS[code] * numbers.sign() * scale


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", "qwen3", tokenizer=True)


def scaled(
    plain: Any, target: Any, names: Any = ("k_scale", "v_scale"), config: Any = CACHE_ALONE, scales: Any = SCALES
) -> Any:
    """The checkpoint with scales of keys and values."""
    copytree(plain, target)
    tensors = load_file(target / "model.safetensors")
    for layer, pair in scales.items():
        for name, scale in zip(names, pair, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    return target


@pytest.fixture(scope="module")
def with_scales(plain: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return scaled(plain, tmp_path_factory.mktemp("scaled") / "model")


def run(path: Any, device: str = "cpu", **settings: Any) -> Any:
    """Greedy tokens, and log probabilities of prompts and tokens; the type of the cache."""
    settings = {"cache__memory": "4MiB", "model__dtype": "float32", "executor__device": device, **settings}
    with Engine(str(path), **settings) as engine:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        done = engine.generate(PROMPTS, params)
        scores = [one.logprob for each in done for one in (*each.prompt_logprobs, *each.logprobs)]
        return [list(each.token_ids) for each in done], torch.tensor(scores), engine.cache_info


def by_hand(path: Any, scales: Any, monkeypatch: Any) -> Any:
    """The same by a float32 cache in which every key and value was rounded when it was written."""

    def write(self, layer: Any, k: Any, v: Any, slots: Any) -> None:
        for pool, numbers, scale in zip((self.keys, self.values), (k, v), scales[layer], strict=True):
            pool[layer].flatten(0, 1)[slots] = rounded(numbers, scale)

    with monkeypatch.context() as patch:
        patch.setattr(KVPool, "write", write)
        return run(path, attention="torch", cache__dtype="float32")


BACKENDS = [
    "torch",
    pytest.param(
        InterpretedTriton,
        marks=pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="its kernels are compiled for the GPU"),
    ),
]


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, for rows of padding
@pytest.mark.parametrize("attention", BACKENDS)
def test_the_tokens_are_those_of_keys_and_values_rounded_by_hand(
    attention: Any, with_scales: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected_tokens, expected, _ = by_hand(with_scales, SCALES, monkeypatch)
    assert "which are not used" in caplog.text
    caplog.clear()
    tokens, scores, info = run(with_scales, attention=attention)
    assert tokens == expected_tokens
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    assert info.kv_dtype == "float8_e4m3fn"
    assert not [record for record in caplog.records if "scale" in record.message]


def test_other_scales_change_the_reference(with_scales: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanging the scales of two layers changes the results, and so do unrounded keys and values."""
    found = [by_hand(with_scales, SCALES, monkeypatch)[1], run(plain)[1]]
    found.append(by_hand(with_scales, {0: SCALES[1], 1: SCALES[0]}, monkeypatch)[1])
    assert all((found[0] - other).abs().max() > 0.05 for other in found[1:])


def test_without_scales_they_are_1_and_one_warning_says_so(
    plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected_tokens, expected, _ = by_hand(plain, dict.fromkeys(SCALES, (1.0, 1.0)), monkeypatch)
    assert not [record for record in caplog.records if "scale" in record.message]
    tokens, scores, info = run(plain, cache__dtype="fp8")
    assert tokens == expected_tokens
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    assert info.kv_dtype == "float8_e4m3fn"
    assert len([record for record in caplog.records if "no scales for the keys and values of 2" in record.message]) == 1


def test_neither_chunks_nor_prefixes_nor_preemption_change_the_tokens(with_scales: Any) -> None:
    expected, _, whole = run(with_scales)
    assert run(with_scales, scheduler__max_batch_tokens=8)[0] == expected
    block = whole.kv_bytes // whole.num_blocks
    small = {"model__max_len": 48, "cache__memory": f"{4 * block}B", "scheduler__max_running": 3}
    assert run(with_scales, **small)[0] == expected
    with Engine(str(with_scales), cache__memory="4MiB", executor__device="cpu", model__dtype="float32") as engine:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        twice = [[list(one.token_ids) for one in engine.generate(PROMPTS, params)] for _ in range(2)]
        assert twice == [expected, expected]
        assert engine.stats().prefix_hits > 0


def test_a_float8_cache_has_four_times_the_blocks_of_a_float32_one(with_scales: Any) -> None:
    counts = [
        run(with_scales, cache__memory="300kB", cache__dtype=dtype)[2].num_blocks for dtype in ("float32", "auto")
    ]
    assert counts[1] // 4 == counts[0] > 0


@pytest.mark.parametrize(
    "names",
    [("k_proj.output_scale", "v_proj.output_scale"), ("k_proj.k_scale", "v_proj.v_scale")],
)
def test_scales_under_older_names_are_read(names: Any, plain: Any, with_scales: Any, tmp_path: Path) -> None:
    assert run(scaled(plain, tmp_path / "model", names))[0] == run(with_scales)[0]


def test_missing_scales_are_1_and_named_in_a_warning(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = scaled(plain, tmp_path / "model", scales={1: SCALES[1]})
    expected = by_hand(path, {0: (1.0, 1.0), 1: SCALES[1]}, monkeypatch)[0]
    assert run(path)[0] == expected
    assert "values of 1 of 2 layers" in caplog.text


def test_half_a_pair_of_scales_is_refused(plain: Any, tmp_path: Path) -> None:
    path = scaled(plain, tmp_path / "model", ("k_scale",), scales={0: (0.1,), 1: (0.1,)})
    with pytest.raises(CheckpointError, match="only one of keys and values"):
        run(path)


def test_what_another_scheme_asks_for_is_not_taken(
    plain: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {**CACHE_ALONE, "kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}
    tokens, _, info = run(scaled(plain, tmp_path / "model", config=config))
    assert tokens == run(plain)[0]
    assert info.kv_dtype == "float32"
    assert "per attn_head, which is not supported" in caplog.text


def test_a_backend_that_reads_none_is_refused_by_name_and_passed_over_by_auto(with_scales: Any) -> None:
    with pytest.raises(PluginError, match="reads keys and values in float32, not float8_e4m3fn; use --kv-dtype"):
        run(with_scales, attention="native")
    with Engine(str(with_scales), cache__memory="4MiB", executor__device="cpu", model__dtype="float32") as engine:
        [choice] = [choice for choice in engine.parts.choices if choice.extension_point == "attention"]
        assert choice.name == "torch"


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_float8_cache_with_fused_kernels_and_graphs_equals_plain_on_a_gpu(
    attention: str, with_scales: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = by_hand(with_scales, SCALES, monkeypatch)[1]
    graphs = "off" if attention == "torch" else "on"
    settings = {"attention": attention, "executor__kernel_cache": str(tmp_path)}
    tokens, scores, _ = run(with_scales, "cuda", executor__graphs=graphs, **settings)
    # A key at the border of two codes may get the other one.
    torch.testing.assert_close(scores, expected, rtol=0.02, atol=0.02)
    assert tokens == run(with_scales, "cuda", executor__graphs="off", **settings)[0]

"""The FlashInfer backend where no GPU is needed: what it refuses, what it chooses, what it hands to the planners."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from engine.core.attention.base import AttentionSpec
from engine.core.config.structure import structure_options
from engine.core.device import DeviceInfo
from engine.core.errors import ConfigError
from engine.core.quant.float8 import UNSCALED, KVScales
from engine.plugins.attention.flashinfer import FlashInferAttention, dense_rows, trial_batch
from engine.plugins.attention.flashinfer_block_lists import page_lists
from engine.plugins.attention.flashinfer_rules import FlashInferOptions, fa3_refusal, workspace_size, xqa_refusal
from engine.plugins.attention.flashinfer_xqa import XqaDecode, score_scale

FLOAT8 = "float8_e4m3fn"
HOPPER = DeviceInfo(type="cuda", capability=(9, 0))
SPEC = AttentionSpec(
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    scale=0.1,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    block_size=16,
    max_len=4096,
    sliding_windows=(None, None),
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "device", "said"),
    [
        ({}, DeviceInfo(type="cpu"), "--device cuda"),
        ({}, DeviceInfo(type="cuda", capability=(7, 5)), "compute capability 8.0, and cuda:0 has 7.5"),
        ({"dtype": "float32", "kv_dtype": "float32"}, HOPPER, "--dtype bfloat16"),
        ({"kv_dtype": "float16"}, HOPPER, "--kv-dtype auto or float8_e4m3fn"),
        ({"kv_dtype": FLOAT8}, DeviceInfo(type="cuda", capability=(8, 0)), "8.9, and cuda:0 has 8.0; use --kv-dtype"),
        ({"head_dim": 96}, HOPPER, "heads of 64 or 128 or 256, not 96"),
    ],
)
def test_refusals_say_what_would_work(changes: dict[str, Any], device: DeviceInfo, said: str) -> None:
    assert FlashInferAttention.refuses(SPEC, HOPPER) is None
    assert FlashInferAttention.refuses(attrs.evolve(SPEC, kv_dtype=FLOAT8), HOPPER) is None
    assert FlashInferAttention.refuses(SPEC, DeviceInfo(type="cuda", capability=(8, 0))) is None
    assert said in (FlashInferAttention.refuses(attrs.evolve(SPEC, **changes), device) or "")


def test_without_flashinfer_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refusal = FlashInferAttention.refuses(SPEC, HOPPER) or ""
    assert "pip install 'apache-tvm-ffi" in refusal
    # On a CPU installing it would not help.
    assert "install" not in (FlashInferAttention.refuses(SPEC, DeviceInfo(type="cpu")) or "")


def test_flash_attention_3_is_for_hopper_and_full_attention() -> None:
    assert fa3_refusal(SPEC, (9, 0), None) is None
    assert "Hopper" in (fa3_refusal(SPEC, (8, 9), None) or "")
    assert "Hopper" in (fa3_refusal(SPEC, (10, 0), None) or "")
    assert "sliding window" in (fa3_refusal(SPEC, (9, 0), 128) or "")
    assert "queries in float8_e4m3fn too" in (fa3_refusal(attrs.evolve(SPEC, kv_dtype=FLOAT8), (9, 0), None) or "")


@pytest.mark.parametrize(
    ("changes", "capability", "said"),
    [
        ({}, (8, 9), "9.0 and above, not 8.9"),
        ({"softcap": 30.0}, (9, 0), "cap scores"),
        ({"block_size": 8}, (9, 0), "KV blocks of 16 or 32 or 64 or 128 tokens, not 8"),
        ({"num_heads": 136}, (9, 0), "at most 16 query heads per KV head, not 17"),
        ({"sliding_windows": (None, 8)}, (9, 0), "behind a sliding window"),
    ],
)
def test_xqa_refusal_says_why(changes: dict[str, Any], capability: tuple[int, int], said: str) -> None:
    assert xqa_refusal(SPEC, (9, 0)) is None
    assert xqa_refusal(attrs.evolve(SPEC, num_heads=128, block_size=128), (12, 0)) is None
    assert said in (xqa_refusal(attrs.evolve(SPEC, **changes), capability) or "")


class FakeFlashInfer:
    """What XqaDecode calls, noted."""

    def __init__(self, monkeypatch: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        self.modules: list[tuple[Any, ...]] = []
        utils, xqa = ModuleType("flashinfer.utils"), ModuleType("flashinfer.xqa")
        utils.device_support_pdl = lambda device: True  # type: ignore[attr-defined]
        utils.get_device_sm_count = lambda device: 132  # type: ignore[attr-defined]
        xqa.xqa = lambda *arguments, **options: self.calls.append(options)  # type: ignore[attr-defined]
        xqa.get_xqa_module = self.module  # type: ignore[attr-defined]
        for module in (ModuleType("flashinfer"), utils, xqa):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def module(self, *key: Any) -> SimpleNamespace:
        self.modules.append(key)
        return SimpleNamespace(xqa=lambda **options: self.calls.append(options))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", FLOAT8])
def test_xqa_receives_its_arguments(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer = FakeFlashInfer(monkeypatch)
    spec = attrs.evolve(SPEC, kv_dtype=kv_dtype)
    q = torch.zeros(3, 32, 128, dtype=torch.bfloat16)
    pool = torch.zeros(5, 16, 8, 128).to(getattr(torch, kv_dtype))
    tables, lengths = torch.zeros(3, 7, dtype=torch.int32), torch.ones(3, 1, dtype=torch.int32)
    scales = KVScales(key=0.5, value=0.25) if kv_dtype == FLOAT8 else UNSCALED
    XqaDecode(spec, torch.device("cpu"))(q, pool, pool, tables, lengths, torch.empty_like(q), scales)
    [call] = flashinfer.calls
    assert call["sliding_win_size"] == 0
    if kv_dtype == FLOAT8:
        # Not the kernel that computes in float8.
        assert call["run_sm90_fp8_mha"] is False
        # The kernel multiplies scores by q_scale * kv_scale / sqrt(head_dim), and results by kv_scale.
        assert call["kv_scale"] == 0.25
        assert call["q_scale"] * 0.25 == pytest.approx(0.1 * 0.5 * 128**0.5)
        assert (call["max_seq_len"], call["batch_size"]) == (7 * 16, 3)
        assert flashinfer.modules == [(torch.bfloat16, torch.float8_e4m3fn, 16, 128, 4, False, torch.bfloat16, 1)]
    else:
        assert call["q_scale"] == score_scale(spec, UNSCALED) == pytest.approx(0.1 * 128**0.5)
        assert flashinfer.modules == []


def test_the_workspace_holds_all_partial_results() -> None:
    # 132 multiprocessors, two blocks each; a block: 128 rows of 128 values and a sum for each of a group of 4 heads.
    assert workspace_size(SPEC, 132) == 2 * 132 * 4 * 128 * 129 * 4 + 2**20
    assert workspace_size(attrs.evolve(SPEC, head_dim=256), 132) == 2 * 132 * 4 * 64 * 257 * 4 + 2**20


def test_options_have_defaults() -> None:
    given = {"prefill": "fa3", "decode": "wrapper", "workspace_bytes": 4096}
    assert structure_options(given, FlashInferOptions, "x") == FlashInferOptions(**given)
    assert FlashInferOptions() == FlashInferOptions(prefill="auto", decode="auto", workspace_bytes=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": "fa4"}, r"x: prefill = 'fa4' is no choice; did you mean fa3 or fa2\? known: auto, fa2, fa3"),
        ({"decode": "xqua"}, r"x: decode = 'xqua' is no choice; did you mean xqa\?"),
        ({"workspace_bytes": -1}, "x: -1 is out of range; give 0 or more"),
        ({"prefil": "fa2"}, r"there is no option 'prefil'; did you mean prefill\?"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        structure_options(options, FlashInferOptions, "x")


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def test_page_lists_have_the_blocks_and_lengths_of_a_batch() -> None:
    tables = np.array([[7, 3, 99], [4, 99, 99], [1, 2, 8]], np.int32)
    lists = page_lists(ints(1, 5, 2), ints(17, 16, 41), tables, 16)
    assert lists.query_starts.tolist() == [0, 1, 6, 8]
    assert lists.page_starts.tolist() == [0, 2, 3, 6]
    assert lists.pages.tolist() == [7, 3, 4, 1, 2, 8]
    assert lists.last_lengths.tolist() == [1, 16, 9]
    assert lists.context_lengths.tolist() == [17, 16, 41]
    assert {one.dtype for one in attrs.astuple(lists)} == {np.dtype(np.int32)}


def test_page_lists_have_no_block_behind_the_window() -> None:
    tables = np.array([[7, 3, 5, 9], [4, 6, 99, 99]], np.int32)
    lists = page_lists(ints(1, 2), ints(64, 20), tables, 16, window=20)
    assert lists.pages.tolist() == [5, 9, 4, 6]  # the first query sees positions from 44 on; from 0 on
    assert lists.page_starts.tolist() == [0, 2, 4]
    assert lists.context_lengths.tolist() == [32, 20]
    assert lists.last_lengths.tolist() == [16, 4]
    assert {one.dtype for one in attrs.astuple(lists)} == {np.dtype(np.int32)}


@pytest.mark.parametrize("window", [1, 4, 16, 17, 1000])
def test_page_lists_lead_to_each_slot_that_a_window_reaches_and_to_no_block_behind(window: int) -> None:
    pick, size = np.random.default_rng(window), 16
    contexts = pick.integers(1, 100, 40).astype(np.int32)
    queries = np.minimum(contexts, pick.integers(1, 20, 40)).astype(np.int32)
    tables = pick.permutation(40 * 7).astype(np.int32).reshape(40, 7)
    lists = page_lists(queries, contexts, tables, size, window)
    for row, context in enumerate(contexts):
        listed = lists.pages[lists.page_starts[row] : lists.page_starts[row + 1]]
        dropped = (context - lists.context_lengths[row]) // size
        first = max(context - queries[row] + 1 - window, 0)
        assert dropped == first // size
        assert listed.tolist() == tables[row, dropped : -(-context // size)].tolist()
        assert (len(listed) - 1) * size + lists.last_lengths[row] == lists.context_lengths[row]


def test_page_lists_of_random_sequences_lead_to_each_slot() -> None:
    pick = np.random.default_rng(0)
    for size in (1, 2, 16):
        lengths = pick.integers(1, 100, 9).astype(np.int32)
        tables = pick.permutation(9 * 100).astype(np.int32).reshape(9, 100)[:, : -(-int(lengths.max()) // size)]
        lists = page_lists(lengths, lengths, tables, size)
        for row, length in enumerate(lengths):
            pages = lists.pages[lists.page_starts[row] : lists.page_starts[row + 1]]
            assert (len(pages) - 1) * size + lists.last_lengths[row] == length
            assert 1 <= lists.last_lengths[row] <= size
            assert pages.tolist() == tables[row, : len(pages)].tolist()


def test_dense_rows_are_the_same_memory() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    for part in (table[:3], table[:3, :6], table[:1, :6], table[:, :10]):
        dense = dense_rows(part)
        assert dense.data_ptr() == table.data_ptr()
        assert dense.is_contiguous()
        assert torch.equal(dense[:, : part.shape[1]], part)


def test_trial_batch_has_one_decode_and_one_prefill() -> None:
    batch = trial_batch(torch.device("cpu"))
    assert (batch.num_decodes, batch.num_sequences) == (1, 2)
    assert len(batch.tokens) == int(batch.query_lens_host.sum()) == int(batch.query_starts[-1])
    assert batch.context_lens.tolist() == batch.context_lens_host.tolist()
    assert batch.block_tables.tolist() == batch.block_tables_host.tolist()
    # The lengths are handed on without a copy, as XQA wants them.
    assert batch.context_lens.view(torch.uint32).data_ptr() == batch.context_lens.data_ptr()

"""Whole engines with a draft model: its own cache follows the target's, and the output is that without drafts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.core import Engine, SamplingParams
from engine.core.errors import ConfigError, PluginError
from engine.core.grammars.grammar import Grammar
from engine.core.types import Request, SpeculationStats
from engine.testing.checkpoints import make_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=40, ignore_eos=True, seed=5)
PROMPTS = [tuple((7 * row + 3 * column) % 256 for column in range(5 + 13 * row)) for row in range(5)]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one draft": {"speculator__max_drafts": 1},
    "many drafts": {"speculator__max_drafts": 8, "scheduler__overlap": "on"},
    "chunks": {"scheduler__max_batch_tokens": 11},
    "small blocks": {"cache__block_size": 4, "cache__prefix_caching": False},
    "multi-step": {"scheduler": "multi_step", "scheduler__overlap": "on"},
    "few requests": {"scheduler__max_running": 2},
}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama", tokenizer=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of another architecture, with other heads and windows, which is hardly ever right."""
    path = tmp_path_factory.mktemp("other")
    return make_checkpoint(path, "qwen2", tokenizer=True, seed=3, head_dim=8, num_key_value_heads=4, **WINDOWS)


def build(target: Path, draft: Path | None, **settings: Any) -> Engine:
    common = {
        "executor__device": "cpu",
        "cache__memory": "8MiB",
        "model__max_len": 256,
        "model__dtype": "float32",
    }
    if draft is not None:
        common |= {"speculator": "draft_model", "speculator__model": str(draft), "speculator__length": "fixed"}
    return Engine(model=str(target), **{**common, **settings})


def tokens_of(engine: Engine, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [done.token_ids for done in engine.generate(PROMPTS, params)]


def speculation(engine: Engine) -> SpeculationStats:
    stats = engine.stats().speculation
    assert stats is not None
    return stats


@pytest.fixture(scope="module")
def expected(target: Path) -> Callable[[SamplingParams], list[tuple[int, ...]]]:
    """Outputs without a speculator."""
    known: dict[SamplingParams, list[tuple[int, ...]]] = {}

    def outputs(params: SamplingParams) -> list[tuple[int, ...]]:
        if params not in known:
            with build(target, None) as engine:
                known[params] = tokens_of(engine, params)
        return known[params]

    return outputs


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_of_the_model_itself_are_all_accepted(
    target: Path, expected: Callable[[SamplingParams], list[tuple[int, ...]]], name: str
) -> None:
    """Each draft is right only if the draft model has the keys and values of all tokens before, at their positions."""
    with build(target, target, **SETTINGS[name]) as engine:
        for _ in range(2):  # the second time prompts are in the prefix cache
            assert tokens_of(engine) == expected(GREEDY)
        stats = speculation(engine)
        assert stats.accepted == stats.verified
        assert sum(stats.accepted) > 100
        assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_without_drafts_when_drafts_are_wrong(
    target: Path, other: Path, expected: Callable[[SamplingParams], list[tuple[int, ...]]], name: str
) -> None:
    with build(target, other, **SETTINGS[name]) as engine:
        assert tokens_of(engine) == expected(GREEDY)
        assert speculation(engine).verified[0] > 0


@pytest.mark.parametrize("wrong", [False, True])
def test_drawn_tokens_of_a_seed_are_those_without_drafts(
    target: Path, other: Path, expected: Callable[[SamplingParams], list[tuple[int, ...]]], wrong: bool
) -> None:
    with build(target, other if wrong else target) as engine:
        assert tokens_of(engine, DRAWN) == expected(DRAWN)
        stats = speculation(engine)
        assert stats.verified[0] > 0
        assert wrong or stats.accepted[0] > 0


def test_a_cached_prefix_has_the_keys_and_values_of_the_draft_model_too(target: Path) -> None:
    prompt = tuple(range(100))
    continued = [(*prompt[:96], 7, 8, 9, last) for last in range(3)]
    with build(target, target) as engine:
        engine.generate([prompt], GREEDY)
        before = engine.stats().prefix_hits
        engine.generate(continued, GREEDY)
        assert engine.stats().prefix_hits - before == 3 * 96
        stats = speculation(engine)
        assert sum(stats.verified) > 100
        assert stats.accepted == stats.verified


def test_drafts_are_right_after_a_preemption(
    target: Path, expected: Callable[[SamplingParams], list[tuple[int, ...]]]
) -> None:
    with build(target, target) as engine:
        bytes_per_block = engine.cache_info.kv_bytes // engine.cache_info.num_blocks
    with build(target, target, model__max_len=128, cache__memory=str(11 * bytes_per_block)) as engine:
        assert tokens_of(engine) == expected(GREEDY)
        assert engine.stats().preemptions > 0
        stats = speculation(engine)
        assert sum(stats.verified) > 0
        assert stats.accepted == stats.verified


def test_no_request_is_preempted_for_blocks_of_drafts(target: Path) -> None:
    """With room for all requests but not for their drafts."""
    with build(target, target) as engine:
        bytes_per_block = engine.cache_info.kv_bytes // engine.cache_info.num_blocks
    tokens = 32  # with the prompt, exactly two blocks of which the last token needs no place
    prompts = [tuple(range(row, row + 10)) for row in range(4)]
    params = attrs.evolve(GREEDY, max_tokens=tokens + 1 - 10)
    with build(target, target, model__max_len=33, cache__memory=str(8 * bytes_per_block)) as engine:
        engine.generate(prompts, params)
        assert engine.cache_info.num_blocks == 8
        assert engine.stats().preemptions == 0
        assert sum(speculation(engine).accepted) > 0


@pytest.mark.parametrize("draft", ["itself", "other"])
def test_windows_of_target_and_draft_model_hold(tmp_path: Path, other: Path, draft: str) -> None:
    path = make_checkpoint(tmp_path, "qwen2", tokenizer=True, **WINDOWS)
    settings = {"cache__block_size": 4, "scheduler__max_batch_tokens": 30, "attention": "torch"}
    with build(path, None, **settings) as engine:
        alone = tokens_of(engine)
    with build(path, path if draft == "itself" else other, **settings) as engine:
        assert tokens_of(engine) == alone
        stats = speculation(engine)
        assert sum(stats.verified) > 0
        assert draft == "other" or stats.accepted == stats.verified


def test_an_aborted_request_leaves_the_others_as_they_are(
    target: Path, expected: Callable[[SamplingParams], list[tuple[int, ...]]]
) -> None:
    with build(target, target) as engine:
        for number, prompt in enumerate(PROMPTS):
            engine.add(Request(id=str(number), prompt=prompt, params=GREEDY))
        found: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
        for step in range(30):
            if step == 4:
                engine.abort("2")
            for output in engine.step():
                found[output.request] += output.tokens
        assert [tuple(tokens) for name, tokens in found.items() if name != "2"] == [
            tokens for number, tokens in enumerate(expected(GREEDY)) if number != 2
        ]


def test_tokens_with_penalties_are_those_without_drafts(target: Path) -> None:
    params = attrs.evolve(GREEDY, repetition_penalty=1.3)
    with build(target, None) as engine:
        alone = tokens_of(engine, params)
    with build(target, target) as engine:
        assert tokens_of(engine, params) == alone
        assert sum(speculation(engine).verified) > 0


def test_tokens_within_a_grammar_are_those_without_drafts(target: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, grammar=Grammar.regex("([a-f]{2} )*x"))
    with build(target, None) as engine:
        alone = tokens_of(engine, params)
    with build(target, target) as engine:
        assert tokens_of(engine, params) == alone


def test_lengths_are_chosen_by_what_pays(
    target: Path, expected: Callable[[SamplingParams], list[tuple[int, ...]]]
) -> None:
    """A draft model as large as the target cannot pay; its cache is kept up all the same."""
    with build(target, target, speculator__length="auto") as engine:
        assert tokens_of(engine) == expected(GREEDY)
        stats = speculation(engine)
        assert stats.accepted == stats.verified


def test_a_quantized_draft_model(target: Path, expected: Callable[[SamplingParams], list[tuple[int, ...]]]) -> None:
    with build(target, target, speculator__quant="int8") as engine:
        assert tokens_of(engine) == expected(GREEDY)
        stats = speculation(engine)
        assert 0 < sum(stats.accepted) < sum(stats.verified)


def test_a_draft_model_of_a_shorter_context_is_warned_of(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = make_checkpoint(tmp_path, "llama", tokenizer=True, max_position_embeddings=128)
    with build(target, short) as engine:
        [done] = engine.generate([tuple(range(120))], GREEDY)
        assert len(done.token_ids) == 40
    assert "was made for contexts of 128 tokens, and up to 256 are served" in caplog.text


@pytest.fixture
def smaller(tmp_path: Path) -> Path:
    """A draft model of fewer tokens, with another tokenizer."""
    return make_checkpoint(tmp_path / "smaller", "llama", vocab_size=400)


def test_engine_refuses_a_draft_model_of_another_number_of_tokens(target: Path, smaller: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 400 tokens, and the model has 512; use a draft model of the same"):
        build(target, smaller)


def test_engine_refuses_a_draft_model_of_another_vocabulary(target: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(target, changed)
    tokenizer = json.loads((changed / "tokenizer.json").read_text())
    [text] = [text for text, token in tokenizer["model"]["vocab"].items() if token == 300]
    tokenizer["model"]["vocab"] = {
        ("another" if token == 300 else text): token for text, token in tokenizer["model"]["vocab"].items()
    }
    (changed / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=f"token 300 is 'another' there, and {text!r} in"):
        build(target, changed)


def test_a_byte_order_mark_of_a_draft_models_tokenizer_makes_no_other_vocabulary(target: Path, tmp_path: Path) -> None:
    marked = tmp_path / "marked"
    shutil.copytree(target, marked)
    tokenizer = (marked / "tokenizer.json").read_text("utf-8")
    (marked / "tokenizer.json").write_text(tokenizer, encoding="utf-8-sig")
    build(target, marked).close()


def test_a_padded_vocabulary_is_no_other_one(
    target: Path, tmp_path: Path, expected: Callable[[SamplingParams], list[tuple[int, ...]]]
) -> None:
    padded = make_checkpoint(tmp_path / "padded", "llama", tokenizer=True, vocab_size=600, seed=1)
    shutil.copy(target / "tokenizer.json", padded)
    with build(target, padded) as engine:
        assert tokens_of(engine) == expected(GREEDY)
        assert speculation(engine).verified[0] > 0


def test_engine_refuses_a_draft_model_without_a_checkpoint(target: Path) -> None:
    with pytest.raises(PluginError, match=r"it needs a draft model; name its directory .* as speculator.model"):
        build(target, None, speculator="draft_model")


def test_engine_refuses_a_checkpoint_for_a_speculator_on_the_host(target: Path) -> None:
    with pytest.raises(PluginError, match=r"it runs on the host and has no checkpoint, but speculator.model"):
        build(target, None, speculator="ngram", speculator__model=str(target))


def test_engine_refuses_a_checkpoint_without_a_speculator(target: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculator.model is set, but no speculator is chosen"):
        build(target, None, speculator__model=str(target))


def test_auto_takes_the_draft_model_where_one_is_named(target: Path) -> None:
    with build(target, target, speculator="auto") as engine:
        assert engine.parts.drafter is not None


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_draft_model_on_a_gpu_proposes_what_the_model_generates(target: Path, graphs: str, overlap: str) -> None:
    settings = {"executor__device": "cuda", "executor__graphs": graphs, "scheduler__overlap": overlap}
    with build(target, None, **settings) as engine:
        expected = tokens_of(engine)
    with build(target, target, **settings) as engine:
        for _ in range(2):
            assert tokens_of(engine) == expected
        stats = speculation(engine)
    assert sum(stats.accepted) > 0.95 * sum(stats.verified), "a last bit may differ with the number of rows"
    assert stats.verified[0] > 20


@pytest.mark.gpu
def test_a_wrong_draft_model_on_a_gpu_changes_no_token(target: Path, other: Path) -> None:
    with build(target, None, executor__device="cuda") as engine:
        expected = tokens_of(engine)
    with build(target, other, executor__device="cuda") as engine:
        assert tokens_of(engine) == expected
        assert speculation(engine).verified[0] > 0

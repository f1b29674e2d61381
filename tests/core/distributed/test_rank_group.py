"""Several ranks compute what one rank computes: real models, runners and gloo, with ranks as threads."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from engine.core import Engine, SamplingParams
from engine.core.device import DeviceInfo
from engine.core.distributed.rank_group import OneRank, RankGroup, TorchGroup, join
from engine.core.distributed.rendezvous import MeetingPoint, Rendezvous
from engine.core.errors import ConfigError, ExecutorError
from engine.core.layers import LayerFactory
from engine.core.runner import graph_capture, start, start_graphs
from engine.core.runner.runner import Runner
from engine.core.weights import SafetensorsSource, load_weights
from engine.core.weights.checkpoint import Checkpoint
from engine.testing.checkpoints import make_checkpoint
from engine.testing.ranks import LoneRank, run_ranks, threaded_ranks
from tests.core.runner.replays import ReplayByRunning
from tests.core.runner.test_cuda_graphs import FixedAttention

CPU = DeviceInfo(type="cpu")
PROMPTS = [[(7 * row + 3 * column) % 500 for column in range(5 + 9 * row)] for row in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
DRAWN = [
    SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=row, max_tokens=10, ignore_eos=True) for row in range(4)
]


def build(path: Path, ranks: int = 1, **settings: Any) -> Engine:
    usual = {"executor__device": "cpu", "model__dtype": "float32", "cache__memory": "4MiB", "model__max_len": 128}
    parts = {"executor": threaded_ranks(ranks)} if ranks > 1 else {}
    return Engine(model=str(path), scheduler__max_running=4, **(usual | settings | parts))


def tokens_of(engine: Engine, params: Any = GREEDY) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(PROMPTS, params)]


def assert_same(path: Path, ranks: int, params: Any = GREEDY, **settings: Any) -> None:
    with build(path, **settings) as one, build(path, ranks, **settings) as shared:
        assert tokens_of(shared, params) == tokens_of(one, params)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def make(name: str, architecture: str, **config: Any) -> Path:
        if name not in made:
            directory = tmp_path_factory.mktemp("model") / name
            made[name] = make_checkpoint(directory, architecture, tokenizer=True, **config)
        return made[name]

    return make


MODELS = {
    "llama": ("llama", {}, 2),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}, 2),
    "qwen2": ("qwen2", {}, 2),
    "qwen3": ("qwen3", {}, 2),
    "mistral": ("mistral", {}, 2),
    "tied": ("qwen3", {"tie_word_embeddings": True}, 2),
    "odd vocabulary": ("llama", {"vocab_size": 517}, 2),
    "odd vocabulary, tied": ("llama", {"vocab_size": 517, "tie_word_embeddings": True}, 2),
    "fewer heads of keys than ranks": ("qwen3", {}, 4),
    "one head of keys, with biases": ("qwen2", {"num_key_value_heads": 1}, 4),
    "three ranks": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}, 3),
}


@pytest.mark.parametrize("case", MODELS)
def test_greedy_tokens_equal_those_of_one_rank(checkpoints: Any, case: str) -> None:
    architecture, config, ranks = MODELS[case]
    assert_same(checkpoints(case, architecture, **config), ranks)


@pytest.mark.parametrize("case", ["qwen3", "odd vocabulary", "fewer heads of keys than ranks"])
def test_logits_equal_those_of_one_rank(checkpoints: Any, case: str) -> None:
    """Log probabilities of prompts and tokens, which need the logits of the whole vocabulary."""
    architecture, config, ranks = MODELS[case]
    path = checkpoints(case, architecture, **config)
    asked = attrs.evolve(GREEDY, logprobs=5, prompt_logprobs=5)

    def scores(engine: Engine) -> tuple[list[list[int]], torch.Tensor]:
        [done] = engine.generate([PROMPTS[2]], asked)
        entries = [*done.prompt_logprobs, *done.logprobs]
        likeliest = [[token for token, _ in entry.top] for entry in entries]
        return likeliest, torch.tensor([[logprob for _, logprob in entry.top] for entry in entries])

    with build(path) as one, build(path, ranks) as shared:
        expected_tokens, expected = scores(one)
        found_tokens, found = scores(shared)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found_tokens == expected_tokens


def test_drawn_tokens_equal_those_of_one_rank(checkpoints: Any) -> None:
    assert_same(checkpoints("qwen3", "qwen3"), 2, DRAWN)


def test_tokens_of_a_batch_with_all_sampling_paths_equal_those_of_one_rank(checkpoints: Any) -> None:
    penalized = attrs.evolve(DRAWN[2], repetition_penalty=1.3, presence_penalty=0.5)
    mixed = [GREEDY, DRAWN[1], penalized, attrs.evolve(GREEDY, logit_bias=((5, 3.0),), frequency_penalty=0.4)]
    assert_same(checkpoints("qwen3", "qwen3"), 2, mixed)


def test_tokens_equal_those_of_one_rank_with_prefill_chunks_and_preemption(checkpoints: Any) -> None:
    path = checkpoints("qwen3", "qwen3")
    assert_same(path, 2, scheduler__max_batch_tokens=7)
    longer = attrs.evolve(GREEDY, max_tokens=30)
    with build(path) as one, build(path, 2, cache__memory="32KiB", model__max_len=64) as shared:
        assert tokens_of(shared, longer) == tokens_of(one, longer)
        assert shared.stats().preemptions > 0


def test_all_ranks_take_the_tokens_of_rank_0(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens drawn on other ranks, which may differ by the order of summation, do not count."""
    path = checkpoints("qwen3", "qwen3")
    with build(path) as one:
        expected = tokens_of(one, DRAWN)
    with build(path, 2) as shared:
        executor: Any = shared._executor
        other = executor.runners[1]._launcher.state.sampler.draw_path
        choose = other._choose_on_this_rank

        def wrong(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, max_logits = choose(*arguments)
            return (tokens + 1) % 512, max_logits

        monkeypatch.setattr(other, "_choose_on_this_rank", wrong)
        assert tokens_of(shared, DRAWN) == expected


def test_replayed_steps_equal_one_rank(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that CUDA graphs record, repeated at each replay: greedy, drawn, and with logits."""
    path = checkpoints("odd vocabulary", "llama", vocab_size=517)
    mixed = [GREEDY, DRAWN[1], GREEDY, DRAWN[3]]
    with build(path) as one:
        expected = [tokens_of(one, params) for params in (GREEDY, mixed)]
    monkeypatch.setattr(graph_capture, "GraphCapturer", ReplayByRunning)
    monkeypatch.setattr(start_graphs, "use_graphs", lambda config, attention, model, device: True)
    with build(path, 2, attention=FixedAttention, executor__graphs="decode") as shared:
        assert [tokens_of(shared, params) for params in (GREEDY, mixed)] == expected


PROCESS = """
import json, sys
from engine.core import Engine, SamplingParams
from engine.core.device import find_device
from engine.core.distributed.rank_group import join
from engine.core.distributed.rendezvous import Rendezvous
from engine.plugins.executors.uniproc import UniprocExecutor

rank, ranks, path, model, settings, prompts, count = map(json.loads, sys.argv[1:])
group = join(Rendezvous(rank=rank, ranks=ranks, place=path, timeout=60.0), find_device(settings["executor__device"]))

class OneOfThem(UniprocExecutor):
    def __init__(self, deployment, options):
        super().__init__(deployment, options)
        self._runner = deployment.make_runner(group)

drawn = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=count, ignore_eos=True)
greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
with Engine(model=model, executor=OneOfThem, **settings) as engine:
    for params in ([greedy] * len(prompts), [drawn] + [greedy] * (len(prompts) - 1)):
        print(json.dumps([list(done.token_ids) for done in engine.generate(prompts, params)]))
group.close()
"""
"""One rank's process: its own engine, which plans the same steps as the engines of the other ranks."""


def in_processes(
    ranks: int, directory: Path, model: Path, prompts: list[list[int]], count: int, settings: dict[str, Any]
) -> None:
    """Assert that ranks in separate processes produce the tokens of one rank in this process, greedy and drawn.

    settings: the device "cuda" stands for a GPU per rank.
    """
    drawn = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=count, ignore_eos=True)
    greedy = attrs.evolve(GREEDY, max_tokens=count)
    plain = {"executor__kernels": "plain", "executor__graphs": "off"}
    with Engine(model=str(model), **(settings | plain)) as one:
        expected = [
            [list(done.token_ids) for done in one.generate(prompts, each)]
            for each in ([greedy] * len(prompts), [drawn] + [greedy] * (len(prompts) - 1))
        ]
    processes = []
    for rank in range(ranks):
        device = f"cuda:{rank}" if settings["executor__device"] == "cuda" else "cpu"
        mine = settings | {"executor__device": device}
        given = rank, ranks, str(directory / "ranks"), str(model), mine, prompts, count
        command = [sys.executable, "-c", PROCESS, *map(json.dumps, given)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        for process in processes:
            out, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            assert [json.loads(line) for line in out.splitlines()] == expected
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="Triton compiles here, and these ranks are CPUs")
def test_fused_kernels_in_processes_equal_one_rank(checkpoints: Any, tmp_path: Path) -> None:
    """In processes: Triton's interpreter cannot run kernels in several threads."""
    model = checkpoints("one layer", "qwen3", vocab_size=517, num_hidden_layers=1)
    settings = {"executor__device": "cpu", "model__dtype": "float32", "cache__memory": "1MiB", "model__max_len": 32}
    in_processes(2, tmp_path, model, [[3, 1, 4], [1, 5]], 2, settings | {"executor__kernels": "fused"})


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize(("architecture", "kernels"), [("qwen3", "fused"), ("qwen3", "plain"), ("qwen3_moe", "fused")])
def test_processes_on_gpus_equal_one_rank(
    checkpoints: Any, tmp_path: Path, ranks: int, graphs: str, architecture: str, kernels: str
) -> None:
    """By NCCL and by kernels that reach the other GPUs' memory; four ranks are more than there are KV heads."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs; torch sees {torch.cuda.device_count()}")
    experts = {"num_experts": 8, "moe_intermediate_size": 32} if architecture == "qwen3_moe" else {}
    model = checkpoints(f"odd vocabulary, {architecture}", architecture, vocab_size=517, **experts)
    settings = {"executor__device": "cuda", "model__dtype": "float32", "cache__memory": "8MiB", "model__max_len": 128}
    in_processes(
        ranks, tmp_path, model, PROMPTS, 16, settings | {"executor__graphs": graphs, "executor__kernels": kernels}
    )


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_long_prompts_on_gpus_equal_one_rank(checkpoints: Any, tmp_path: Path, ranks: int, graphs: str) -> None:
    """Sums of that many rows run next to computation."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs; torch sees {torch.cuda.device_count()}")
    model = checkpoints("long", "qwen3", vocab_size=517, max_position_embeddings=4096)
    settings = {"executor__device": "cuda", "model__dtype": "float32", "cache__memory": "32MiB"}
    settings |= {"model__max_len": 4096, "executor__graphs": graphs, "executor__kernels": "fused"}
    settings |= {"scheduler__max_batch_tokens": 1280 * ranks} if graphs == "on" else {}
    prompts = [[(7 * row + 3 * column) % 500 for column in range(1100 + 900 * row)] for row in range(3)]
    in_processes(ranks, tmp_path, model, prompts, 8, settings)


def test_group_reduces_gathers_and_broadcasts() -> None:
    def work(group: RankGroup) -> list[Any]:
        x = torch.arange(6.0).view(2, 3) + group.rank
        return [
            group.all_reduce(x.clone().t()),
            group.all_reduce(x.to(torch.bfloat16)).float() + group.all_reduce(x.to(torch.float16)).float(),
            group.all_gather(x.to(torch.bfloat16)),
            group.broadcast(torch.tensor([group.rank + 5])),
            group.minimum(7 - group.rank),
        ]

    base = torch.arange(6.0).view(2, 3)
    for total, halves, gathered, first, least in run_ranks(3, work):
        assert torch.equal(total, (3 * base + 3).t())
        assert torch.equal(halves, 2 * (3 * base + 3))
        assert torch.equal(gathered.float(), torch.stack([base, base + 1, base + 2]))
        assert first.tolist() == [5]
        assert least == 5


def test_a_rank_that_is_alone_waits_for_no_other() -> None:
    def work(group: RankGroup) -> float:
        if group.rank == 0:
            with group.alone():
                assert group.all_reduce(torch.ones(2)).tolist() == [1, 1]
                assert group.all_gather(torch.ones(2)).shape == (2, 2)
                assert group.broadcast(torch.ones(2)).tolist() == [1, 1]
                assert group.minimum(7) == 7
        return group.all_reduce(torch.tensor([1.0])).item()

    assert run_ranks(2, work) == [2, 2]


def test_vocab_parallel_head_has_all_logits_and_the_first_of_equal_ones() -> None:
    """Also if a rank has fewer tokens than the others, and with a NaN in a row."""
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(21, 8, generator=generator), torch.randn(5, 8, generator=generator)
    weight[[3, 9, 20]] = 4 * hidden[1]
    hidden[2] = torch.nan
    expected = hidden @ weight.T

    def work(group: RankGroup) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        layers = LayerFactory(dtype="float32", device="cpu", group=group)
        table = layers.embedding("table", 21, 8)
        head = layers.lm_head("head", 21, 8, table)
        table.fill({"table.weight": weight[8 * group.rank :][:8]})
        layers.layers[-1].fill({})
        return head(hidden), head.greedy(hidden)

    for logits, (max_logits, tokens) in run_ranks(3, work):
        torch.testing.assert_close(logits, expected, equal_nan=True)
        assert max_logits[2].isnan()
        assert 0 <= tokens[2] < 21
        others = [0, 1, 3, 4]
        torch.testing.assert_close(max_logits[others], expected[others].amax(1))
        assert tokens[others].tolist() == expected[others].argmax(1).tolist()
        assert tokens[1] == 3


def test_a_single_rank_exchanges_nothing() -> None:
    group = join(Rendezvous(rank=0, ranks=1, place="/nowhere"), CPU)
    x = torch.ones(2)
    assert isinstance(group, OneRank)
    assert group.all_reduce(x) is x
    assert group.broadcast(x) is x
    assert group.all_gather(x).shape == (1, 2)
    assert group.minimum(3) == 3
    group.close()


def test_ranks_meet_at_the_address_of_a_meeting_point() -> None:
    point = MeetingPoint("127.0.0.1")
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", point.place)

    def add(group: RankGroup) -> list[float]:
        return group.all_reduce(torch.tensor([1.0 + group.rank, 2.0])).tolist()  # type: ignore[no-any-return]

    point.serve()
    assert run_ranks(3, add, place=point.place) == [[6.0, 6.0]] * 3


def test_meeting_point_errors_if_the_address_is_foreign_or_unreachable() -> None:
    with pytest.raises(ExecutorError, match=r"cannot meet at 203\.0\.113\.1, which is not an address of this host: "):
        MeetingPoint("203.0.113.1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # no one else can take its port, and no one listens there
        place = "tcp://{}:{}".format(*silent.getsockname())
        with pytest.raises(ExecutorError, match=r"rank 1 of 2: joining the others failed: "):
            join(Rendezvous(rank=1, ranks=2, place=place, timeout=0.3), CPU)


def test_errors_name_rank_and_operation(tmp_path: Path) -> None:
    alone = Rendezvous(rank=1, ranks=2, place=str(tmp_path / "ranks"), timeout=0.3)
    with pytest.raises(ExecutorError, match=r"rank 1 of 2: joining the others failed: .*another rank may have stopped"):
        join(alone, CPU)

    def leave_early(group: RankGroup) -> None:
        if group.rank == 0:
            group.all_reduce(torch.ones(4))

    with pytest.raises(ExecutorError, match="rank 0 of 2: all_reduce failed"):
        run_ranks(2, leave_early, timeout=10.0)

    def use_after(group: RankGroup) -> None:
        group.close()
        group.close()
        assert isinstance(group, TorchGroup)
        group.broadcast(torch.ones(1))

    with pytest.raises(ExecutorError, match="rank 0 of 2 has left the others; broadcast cannot be done"):
        run_ranks(2, use_after)


def runner_of(path: Path, group: RankGroup) -> Runner:
    with build(path) as engine:
        return Runner(engine.config, engine.parts, Checkpoint.open(path), CPU, group)


@pytest.mark.parametrize(
    ("ranks", "config", "message"),
    [
        (3, {}, "3 ranks cannot share this model's 4 query heads and 2 key and value heads .*can: 1, 2, 4"),
        (8, {}, "8 ranks cannot share this model's 4 query heads"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 3}, "12 query heads and 3 .* can: 1, 3, 6, 12"),
    ],
)
def test_number_of_ranks_must_divide_the_heads(
    checkpoints: Any, ranks: int, config: dict[str, int], message: str
) -> None:
    path = checkpoints(f"{config}", "qwen3", **config)
    with pytest.raises(ConfigError, match=message):
        runner_of(path, LoneRank(0, ranks))


def test_number_of_ranks_must_divide_the_other_sizes(checkpoints: Any) -> None:
    path = checkpoints("narrow", "qwen3", intermediate_size=98, num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(ConfigError, match=r"4 ranks cannot share 98 outputs of model\.layers\.0\.mlp\.gate_proj"):
        runner_of(path, LoneRank(0, 4)).start()
    with pytest.raises(ConfigError, match="4 ranks cannot share a vocabulary of 5"):
        LayerFactory(dtype="float32", device="cpu", group=LoneRank(0, 4)).embedding("table", 5, 8)
    layers = LayerFactory(dtype="float32", device="cpu", group=LoneRank(0, 2))
    with pytest.raises(ConfigError, match="share a vocabulary of 16777216 tokens at most"):
        layers.lm_head("head", 2**24 + 8, 8)


def test_each_rank_holds_its_shards_only(checkpoints: Any) -> None:
    """Shards of the vocabulary and of heads."""
    path = checkpoints("odd vocabulary", "llama", vocab_size=517)
    whole, shares = [], []
    for ranks in (1, 2):
        for rank in range(ranks):
            layers = LayerFactory(dtype="float32", device="cpu", group=LoneRank(rank, ranks))
            table = layers.embedding("model.embed_tokens", 517, 64)
            qkv = layers.qkv(
                tuple(f"model.layers.0.self_attn.{one}_proj" for one in "qkv"),  # type: ignore[arg-type]
                64, num_heads=4, num_kv_heads=2, head_dim=16,
            )  # fmt: skip
            layers.ignore("*")
            load_weights(layers, SafetensorsSource(Checkpoint.open(path)))
            (whole if ranks == 1 else shares).append((table.weight, qkv.weights["weight"].to_dense()))
    assert [len(table) for table, _ in shares] == [264, 253]
    assert torch.equal(torch.cat([table for table, _ in shares]), whole[0][0])
    q, k, v = whole[0][1].split([64, 32, 32])
    expected = torch.cat([q[:32], k[:16], v[:16]]), torch.cat([q[32:], k[16:], v[16:]])
    for (_, found), wanted in zip(shares, expected, strict=True):
        assert torch.equal(found, wanted)


def test_all_ranks_have_the_smallest_number_of_blocks(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints("qwen3", "qwen3")
    plan = start.plan_memory
    planned: list[int] = []

    def uneven(*arguments: Any, **named: Any) -> Any:
        made = plan(*arguments, **named)
        planned.append(made.num_blocks - len(planned))
        return attrs.evolve(made, num_blocks=planned[-1])

    monkeypatch.setattr(start, "plan_memory", uneven)
    with build(path, 2) as shared:
        executor: Any = shared._executor
        assert [each._launcher.state.pool.num_blocks for each in executor.runners] == [min(planned)] * 2
        assert len(set(planned)) == 2

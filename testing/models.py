"""Conformance suite for models: logits equal those of transformers for all chunks, batches and ranks."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.distributed import RankGroup
from engine.core.errors import CheckpointError
from engine.core.models import Model, ModelSpec
from engine.core.weights import SINGLE, Checkpoint, DummySource
from engine.testing.checkpoints import make_checkpoint
from engine.testing.model_bench import ModelBench
from engine.testing.ranks import run_ranks

LENGTHS = (100, 41, 6)
"""Tokens of the prompts."""
ROUNDING = 0.05
"""Limit of the relative error (norms) of logits in bfloat16."""


class ModelConformance:
    """Derive a class named Test... from this one; set `model` and `architecture`, or override `checkpoint` and
    `reference`."""

    model: ClassVar[type[Model]]
    options: ClassVar[Any] = None
    """Options of the model; None: the defaults of its options_class."""
    architecture: ClassVar[str] = ""
    """model_type in transformers."""
    config: ClassVar[Mapping[str, Any]] = {}
    """Keys of config.json that differ from testing.checkpoints.TINY."""
    ranks: ClassVar[tuple[int, ...]] = (2, 4)
    """Numbers of ranks that the model can be sharded over."""
    error: ClassVar[float] = 2e-5
    """Limit of the relative error (norms) of logits in float32."""
    rerouted: ClassVar[float] = 0.0
    """Share of tokens that may differ more in bfloat16, where the router of a mixture may choose other experts."""

    def checkpoint(self, directory: Path) -> Path:
        """Write a tiny random checkpoint of one file, in float32, and return its directory."""
        return make_checkpoint(directory / "model", self.architecture, **self.config)

    def reference(self, checkpoint: Path, tokens: list[int]) -> torch.Tensor:
        """The expected logits of all tokens of a prompt: [tokens, vocab_size]."""
        import transformers

        library: Any = transformers  # without types
        model = library.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
        return logits

    def test_logits(self, tmp_path: Path) -> None:
        """Logits of whole prompts equal the reference."""
        path = self.checkpoint(tmp_path)
        bench = self.bench(path)
        for number, tokens in enumerate(bench.prompts):
            expected = self.reference(path, list(tokens))
            self._close(bench.prompt_logits(number), expected, f"a prompt of {len(tokens)} tokens")

    def test_prefill_chunks(self, tmp_path: Path) -> None:
        """A prompt in chunks, some of one token, has the logits of the whole prompt."""
        path = self.checkpoint(tmp_path)
        expected = self.bench(path).prompt_logits(0)
        found = self.bench(path).prompt_logits(0, [37, 1, 1, 30, 1, 30])
        self._close(found, expected, "a prompt in chunks")

    def test_batches(self, tmp_path: Path) -> None:
        """Decodes and prefill chunks of several prompts in one batch have the same logits as alone."""
        path = self.checkpoint(tmp_path)
        bench = self.bench(path)
        expected = [self.bench(path).prompt_logits(number) for number in range(len(LENGTHS))]
        for chunks in (
            [(0, 0, 60), (2, 0, 5)],
            [(2, 5, 1), (0, 60, 30), (1, 0, 40)],
            [(1, 40, 1), (0, 90, 10)],
        ):
            found = bench.logits(chunks).split([count for _, _, count in chunks])  # type: ignore[no-untyped-call]
            for part, (number, start, count) in zip(found, chunks, strict=True):
                self._close(part, expected[number][start : start + count], f"tokens {start} on of prompt {number}")

    def test_model_keeps_no_state_between_passes(self, tmp_path: Path) -> None:
        """The same logits after passes of other lengths and of other tokens at the same positions."""
        path = self.checkpoint(tmp_path)
        bench, other = self.bench(path), self.bench(path)
        prompt = bench.prompts[0]
        other.prompts[0] = prompt[::-1]
        expected = bench.prompt_logits(0), other.prompt_logits(0)
        bench.prompt_logits(1)
        for tokens, logits in zip((prompt[::-1], prompt), reversed(expected), strict=True):
            bench.prompts[0] = tokens
            self._close(bench.prompt_logits(0), logits, "a prompt after others")

    def test_greedy(self, tmp_path: Path) -> None:
        """greedy() returns the max logits and their tokens."""
        bench = self.bench(self.checkpoint(tmp_path))
        hidden = bench.hidden([(0, 0, 50)])
        with torch.inference_mode():
            logits = bench.model.logits(hidden)
            max_logits, tokens = bench.model.greedy(hidden)
        assert max_logits.dtype == torch.float32, f"greedy() gives logits in {max_logits.dtype}, not float32"
        assert tokens.dtype == torch.int64, f"greedy() gives tokens in {tokens.dtype}, not int64"
        assert torch.equal(tokens, logits.argmax(-1)), "greedy() gives other tokens than those of the largest logits"
        self._close(max_logits[None], logits.amax(-1)[None], "greedy()")

    @pytest.mark.parametrize("number", range(2))
    def test_ranks(self, tmp_path: Path, number: int) -> None:
        """Every one of several ranks computes the logits and tokens of a single rank."""
        if number >= len(self.ranks):
            pytest.skip(f"the model runs on {self.ranks} ranks only")
        path = self.checkpoint(tmp_path)
        chunks = [(2, 0, 6), (1, 0, 41)]
        expected = self.bench(path).logits(chunks)

        def work(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
            bench = self.bench(path, group=group)
            hidden = bench.hidden(chunks)
            with torch.inference_mode():
                return bench.model.logits(hidden), bench.model.greedy(hidden)[1]

        ranks = self.ranks[number]
        for rank, (found, tokens) in enumerate(run_ranks(ranks, work)):
            self._close(found, expected, f"rank {rank} of {ranks}")
            assert torch.equal(tokens, expected.argmax(-1)), f"greedy() on rank {rank} of {ranks} gives other tokens"

    def test_every_tensor_counts(self, tmp_path: Path) -> None:
        """Changing any tensor that is read changes logits. (Core refuses tensors that are neither read nor ignored.)"""
        path = self.checkpoint(tmp_path)
        bench = self.bench(path)
        prompt = [(1, 0, LENGTHS[1])]  # of enough tokens that each of a few experts is chosen
        before = bench.logits(prompt)
        tensors = load_file(path / SINGLE)
        read = {name for layer in bench.layers.layers for name in layer.tensors()}
        other = Path(shutil.copytree(path, tmp_path / "other"))
        for name, tensor in tensors.items():
            if name not in read:
                continue
            draw = torch.Generator().manual_seed(1)
            changed = tensor + torch.randn(tensor.shape, generator=draw).to(tensor.dtype)
            save_file({**tensors, name: changed}, other / SINGLE, metadata={"format": "pt"})
            after = self.bench(other).logits(prompt)
            assert not torch.equal(before, after), f"{name} is read, but changes nothing; `layers.ignore` it, or use it"

    def test_rounding(self, tmp_path: Path) -> None:
        """Logits in bfloat16 are close to those in float32."""
        path = self.checkpoint(tmp_path)
        save_file(
            {name: tensor * 0.3 if tensor.dim() > 1 else tensor for name, tensor in load_file(path / SINGLE).items()},
            path / SINGLE,
            metadata={"format": "pt"},
        )
        exact = self.bench(path).prompt_logits(1)
        rounded = self.bench(path, dtype="bfloat16").prompt_logits(1)
        assert rounded.dtype == torch.bfloat16, f"logits are in {rounded.dtype}, not in the model's bfloat16"
        errors = _relative_errors(rounded.float(), exact).nan_to_num(nan=-1.0)  # NaN is not excused
        kept = errors.argsort()[: round(len(errors) * (1 - self.rerouted))].sort().values
        self._close(rounded[kept].float(), exact[kept], "bfloat16", ROUNDING)

    def test_dummy_weights(self, tmp_path: Path) -> None:
        """With --load-format dummy all logits are finite."""
        path = self.checkpoint(tmp_path)
        logits = self.bench(path, source=DummySource(seed=3)).prompt_logits(1)
        assert bool(torch.isfinite(logits).all()), "random weights give logits that are not finite"

    def test_spec(self, tmp_path: Path) -> None:
        """Shapes of results agree with spec()."""
        bench = self.bench(self.checkpoint(tmp_path))
        spec, hidden = bench.spec, bench.hidden([(2, 0, 6)])
        assert list(hidden.shape) == [6, spec.hidden_size], (
            f"hidden states of {list(hidden.shape)}, not {[6, spec.hidden_size]}"
        )
        assert bench.logits([(2, 0, 6)]).shape[1] == spec.vocab_size, f"logits are not of {spec.vocab_size} tokens"
        assert len(spec.sliding_windows) == spec.num_layers, (
            f"{len(spec.sliding_windows)} sliding_windows of {spec.num_layers} layers"
        )

    def test_refusals(self, tmp_path: Path) -> None:
        """The model accepts its own config.json and refuses an unknown architecture with a sentence."""
        config = Checkpoint.open(self.checkpoint(tmp_path)).config
        refusal = self.model.refuses(config)
        assert refusal is None, f"{self.model.__name__} refuses its own config.json: {refusal}"
        unknown = self.model.unknown_keys({**config, "a key of nobody's": 1})
        assert all(isinstance(key, str) for key in unknown), f"unknown_keys() answers {unknown!r}, not names of keys"
        refusal = self.model.refuses({**config, "architectures": ["NobodysForCausalLM"], "model_type": "nobody-s"})
        assert isinstance(refusal, str), f"refuses() answers {refusal!r} to an architecture that it cannot know"
        assert refusal, "refuses() answers with an empty string"

    def test_missing_keys(self, tmp_path: Path) -> None:
        """For every key that config.json lacks there is a default, or a CheckpointError that names the key."""
        config = Checkpoint.open(self.checkpoint(tmp_path)).config
        for key in config:
            try:
                spec = self.model.spec({name: value for name, value in config.items() if name != key})
            except CheckpointError as error:
                self._check_named(key, str(error))
            else:
                assert isinstance(spec, ModelSpec), f"spec() answers {spec!r}"

    def _check_named(self, key: str, message: str) -> None:
        assert key in message, f"the error of a config.json without {key} does not name it: {message}"

    def bench(self, path: Path, **settings: Any) -> ModelBench:
        """A ModelBench with the model, its weights and the prompts."""
        vocabulary = self.model.spec(Checkpoint.open(path).config).vocab_size
        draw = torch.Generator().manual_seed(7)
        prompts = [torch.randint(0, vocabulary, (length,), generator=draw).tolist() for length in LENGTHS]
        options = self.options
        if options is None and self.model.options_class is not None:
            options = self.model.options_class()
        return ModelBench(self.model, path, prompts, options=options, **settings)

    def _close(self, found: torch.Tensor, expected: torch.Tensor, what: str, limit: float | None = None) -> None:
        assert found.shape == expected.shape, f"{what}: shape {list(found.shape)}, not {list(expected.shape)}"
        errors = _relative_errors(found, expected)
        row, largest = int(errors.argmax()), float(errors.max())
        limit = limit or self.error
        assert largest <= limit, (
            f"{what}: relative error {largest:.2e} in row {row}, more than {limit:.0e} (NaN: a slot of \
the cache that nothing was written to, or the wrong one, was read)"
        )


def _relative_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The norm of each row's difference, relative to the row."""
    errors: torch.Tensor = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return errors

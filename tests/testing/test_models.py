"""The model suite finds faults, and passes a correct model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

from engine.core.errors import CheckpointError
from engine.core.models.base import Model
from engine.plugins.models.llama import Llama
from engine.testing.models import ModelConformance


class Tiny(ModelConformance):
    """One layer with biases. Each faulty model below changes one thing in Llama."""

    model = Llama
    architecture = "llama"
    config = {"attention_bias": True, "num_hidden_layers": 1}  # noqa: RUF012


@frozen
class Options:
    depth: int = 1


class Optioned(Llama):
    options_class = Options

    def __init__(self, config: Any, layers: Any, options: Any = None) -> None:
        assert options == Options()
        super().__init__(config, layers, options)


class TestOptioned(Tiny):
    model = Optioned


class WrongRope(Llama):
    """Rotates by another base."""

    @classmethod
    def parse(cls, config: Any) -> Any:
        shape = super().parse(config)
        wrong = [evolve(rope, parameters={**rope.parameters, "rope_theta": 500.0}) for rope in shape.ropes if rope]
        return evolve(shape, ropes=tuple(wrong))


class Unbiased(Llama):
    """Does not read the biases."""

    @classmethod
    def parse(cls, config: Any) -> Any:
        return evolve(super().parse(config), qkv_bias=False, output_bias=False)

    def __init__(self, config: Any, layers: Any, options: Any = None) -> None:
        super().__init__(config, layers, options)
        layers.ignore("*.bias")


class Passing(Llama):
    """Passes another batch to the layers."""

    def forward(self, run: Any) -> Any:
        return super().forward(evolve(run, batch=self.changed(run.batch)))


class FromZero(Passing):
    """Counts the positions of each batch from 0."""

    def changed(self, batch: Any) -> Any:
        return evolve(batch, positions=batch.positions - batch.positions[0])


class Arranged(Passing):
    """Numbers positions consecutively over the batch."""

    def changed(self, batch: Any) -> Any:
        return evolve(batch, positions=batch.positions[0] + torch.arange(len(batch.positions)))


class Remembering(Llama):
    """Returns the hidden states of the first batch of each size."""

    def __init__(self, config: Any, layers: Any, options: Any = None) -> None:
        super().__init__(config, layers, options)
        self.kept: dict[int, torch.Tensor] = {}

    def forward(self, run: Any) -> Any:
        hidden = super().forward(run)
        return self.kept.setdefault(len(hidden), hidden)


class Least(Llama):
    def greedy(self, hidden: Any) -> Any:
        max_logits, tokens = super().greedy(-hidden)
        return max_logits, tokens


class LowMaxLogits(Llama):
    def greedy(self, hidden: Any) -> Any:
        max_logits, tokens = super().greedy(hidden)
        return max_logits - 1, tokens


class OtherTypes(Llama):
    def greedy(self, hidden: Any) -> Any:
        max_logits, tokens = super().greedy(hidden)
        return max_logits, tokens.int()


class DoubleMaxLogits(Llama):
    def greedy(self, hidden: Any) -> Any:
        max_logits, tokens = super().greedy(hidden)
        return max_logits.double(), tokens


class Unreduced(Llama):
    """Takes one rank's addend of the last partial sum for the sum."""

    def __init__(self, config: Any, layers: Any, options: Any = None) -> None:
        super().__init__(config, layers, options)
        norm: Any = self._norm
        self._norm = lambda hidden, residual: norm(hidden.addend, residual)  # type: ignore[assignment,misc]


class OwnTokens(Llama):
    """Finds the most likely token of its own shard of the vocabulary."""

    def __init__(self, config: Any, layers: Any, options: Any = None) -> None:
        super().__init__(config, layers, options)
        self.rank, self.ranks = layers.rank, layers.ranks

    def greedy(self, hidden: Any) -> Any:
        max_logits, tokens = self.logits(hidden).chunk(self.ranks, -1)[self.rank].max(-1)
        return max_logits.float(), tokens


class Unused(Llama):
    """Reads the last norm's weight but does not use it."""

    def forward(self, run: Any) -> Any:
        self._norm.weight = torch.ones_like(self._norm.weight)
        return super().forward(run)


class Unknowing(Llama):
    """Neither reads nor ignores the biases."""

    @classmethod
    def parse(cls, config: Any) -> Any:
        return evolve(super().parse(config), qkv_bias=False, output_bias=False)


class Widened(Llama):
    def logits(self, hidden: Any) -> Any:
        return super().logits(hidden).float()


class Coarse(Llama):
    """Rounds hidden states to three bits in bfloat16."""

    def logits(self, hidden: Any) -> Any:
        if hidden.dtype == torch.bfloat16:
            hidden = hidden.to(torch.float8_e5m2).to(torch.bfloat16)
        return super().logits(hidden)


class Infinite(Llama):
    def logits(self, hidden: Any) -> Any:
        return super().logits(hidden) / 0


class Peeking(Llama):
    """Reads a field of the batch that only attention may read."""

    def forward(self, run: Any) -> Any:
        return super().forward(run)[: len(run.batch.context_lens) and None]


class OtherHidden(Llama):
    @classmethod
    def spec(cls, config: Any) -> Any:
        return evolve(super().spec(config), hidden_size=63)


class OtherVocabulary(Llama):
    @classmethod
    def spec(cls, config: Any) -> Any:
        return evolve(super().spec(config), vocab_size=500)


class MoreWindows(Llama):
    @classmethod
    def spec(cls, config: Any) -> Any:
        spec = super().spec(config)
        return evolve(spec, sliding_windows=(*spec.sliding_windows, None))


class Willing(Llama):
    @classmethod
    def refuses(cls, config: Any) -> Any:
        return None


class Unwilling(Llama):
    @classmethod
    def refuses(cls, config: Any) -> Any:
        return "no"


class Silent(Llama):
    @classmethod
    def refuses(cls, config: Any) -> Any:
        return "" if super().refuses(config) else None


class Raw(Llama):
    @classmethod
    def spec(cls, config: Any) -> Any:
        assert config["hidden_size"]
        return super().spec(config)


class Nameless(Llama):
    @classmethod
    def spec(cls, config: Any) -> Any:
        if "hidden_size" not in config:
            raise CheckpointError("config.json lacks something")
        return super().spec(config)


class Shapeless(Llama):
    @classmethod
    def spec(cls, config: Any) -> Any:
        return super().spec(config) if "hidden_size" in config else None


FAULTS: list[tuple[type[Model], str, tuple[Any, ...], str]] = [
    (WrongRope, "test_logits", (), "a prompt of 100 tokens: relative error"),
    (Unbiased, "test_logits", (), "a prompt of 100 tokens: relative error"),
    (FromZero, "test_prefill_chunks", (), "a prompt in chunks: relative error"),
    (Peeking, "test_prefill_chunks", (), "NoneType"),
    (Arranged, "test_batches", (), "of prompt 2: relative error"),
    (Remembering, "test_model_keeps_no_state_between_passes", (), "a prompt after others: relative error"),
    (Least, "test_greedy", (), "other tokens than those of the largest logits"),
    (LowMaxLogits, "test_greedy", (), "greedy.*: relative error"),
    (OtherTypes, "test_greedy", (), "gives tokens in torch.int32"),
    (DoubleMaxLogits, "test_greedy", (), "gives logits in torch.float64"),
    (Unreduced, "test_ranks", (0,), "rank 0 of 2: relative error"),
    (Unreduced, "test_ranks", (1,), "rank 0 of 4: relative error"),
    (OwnTokens, "test_ranks", (0,), "on rank 0 of 2 gives other tokens"),
    (Unused, "test_every_tensor_counts", (), "model.norm.weight is read, but changes nothing"),
    (Unknowing, "test_every_tensor_counts", (), "does not know: .*bias"),
    (Widened, "test_rounding", (), "logits are in torch.float32"),
    (Coarse, "test_rounding", (), "bfloat16: relative error"),
    (Infinite, "test_dummy_weights", (), "not finite"),
    (OtherHidden, "test_spec", (), "hidden states of"),
    (OtherVocabulary, "test_spec", (), "logits are not of 500 tokens"),
    (MoreWindows, "test_spec", (), "of 1 layers"),
    (Willing, "test_refusals", (), "answers None to an architecture"),
    (Unwilling, "test_refusals", (), "refuses its own config.json: no"),
    (Silent, "test_refusals", (), "with an empty string"),
    (Raw, "test_missing_keys", (), "hidden_size"),
    (Nameless, "test_missing_keys", (), "config.json without hidden_size does not name it"),
    (Shapeless, "test_missing_keys", (), "spec.. answers None"),
]


@pytest.mark.parametrize(
    ("model", "test", "arguments", "message"), FAULTS, ids=[f"{fault[0].__name__}-{fault[1]}" for fault in FAULTS]
)
def test_suite_finds_fault(
    model: type[Model], test: str, arguments: tuple[Any, ...], message: str, tmp_path: Path
) -> None:
    suite = type("Suite", (Tiny,), {"model": model})()
    with pytest.raises((AssertionError, CheckpointError, KeyError, TypeError), match=message):
        getattr(suite, test)(tmp_path, *arguments)


class Rerouted(Llama):
    """In bfloat16 gives the first two tokens logits of others, as a router may, or none at all."""

    wrong = 2.0

    def logits(self, hidden: Any) -> Any:
        logits = super().logits(hidden)
        if hidden.dtype == torch.bfloat16:
            logits[:2] *= self.wrong
        return logits


class Lost(Rerouted):
    wrong = torch.nan


def test_rounding_excuses_the_share_of_tokens_that_a_model_says(tmp_path: Path) -> None:
    def suite(model: type[Model], rerouted: float) -> Any:
        return type("Suite", (Tiny,), {"model": model, "rerouted": rerouted})()

    suite(Rerouted, 0.05).test_rounding(tmp_path / "excused")
    with pytest.raises(AssertionError, match="bfloat16: relative error"):
        suite(Rerouted, 0.0).test_rounding(tmp_path / "not")
    with pytest.raises(AssertionError, match="bfloat16: relative error nan"):
        suite(Lost, 0.05).test_rounding(tmp_path / "nan")

"""A model with its own KV cache, which computes the batches that a test asks for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from engine.core.attention import AttentionBackend, AttentionSpec, ForwardBatch, KVPool
from engine.core.config import EngineConfig
from engine.core.distributed import RankGroup
from engine.core.layers import LayerFactory
from engine.core.models import ForwardPass, Model
from engine.core.plugin_host import attention_spec, cache_layout, load_plugins
from engine.core.quant import QuantMethod
from engine.core.weights import Checkpoint, SafetensorsSource, WeightSource, load_weights

MAX_TOKENS = 112
"""Maximum tokens per sequence."""

Chunk = tuple[int, int, int]
"""Sequence, first token, number of tokens."""


@cache
def _torch_attention() -> type[AttentionBackend[Any, Any]]:
    return load_plugins().attention.get("torch").load()


class ModelBench:
    """One rank of a model on the CPU. Slots of the KV cache hold NaN until they are written."""

    def __init__(
        self,
        model: type[Model],
        directory: Path,
        prompts: list[list[int]],
        *,
        options: Any = None,
        dtype: str = "float32",
        source: WeightSource | None = None,
        group: RankGroup | None = None,
        quant: QuantMethod[Any] | None = None,
        **settings: Any,
    ) -> None:
        """prompts: token ids of each sequence, at most MAX_TOKENS. source: of the weights; None: the checkpoint.

        settings: further arguments of LayerFactory.
        """
        checkpoint = Checkpoint.open(directory)
        self.prompts = prompts
        self.spec = model.spec(checkpoint.config)
        source = source or SafetensorsSource(checkpoint)
        self.layers = LayerFactory(dtype=dtype, device="cpu", group=group, quant=quant, stored=source.names, **settings)
        self.model = model(checkpoint.config, self.layers, options)
        with torch.inference_mode():
            load_weights(self.layers, source, threads=1)
        shape = self._attention_spec(dtype)
        self._block_size = shape.block_size
        num_blocks = -(-MAX_TOKENS // self._block_size)
        blocks = np.arange(num_blocks * len(prompts), dtype=np.int32)[::-1].copy()
        self._tables = blocks.reshape(len(prompts), num_blocks)
        self._pool = KVPool(shape, self._tables.size, "cpu")
        for tensor in (*self._pool.keys, *self._pool.values):
            tensor.fill_(torch.nan)
        self._attention = _torch_attention()(shape, self._pool, None)
        if self.layers.sinks:
            sinks = {reader.layer: reader.weight for reader in self.layers.sinks}
            self._attention.set_sinks([sinks.get(layer) for layer in range(shape.num_layers)])

    def _attention_spec(self, dtype: str) -> AttentionSpec:
        """The attention of all layers. Those of `layer_caches` must be of one cache group."""
        settings = (self.spec, EngineConfig(), dtype, self.spec.max_len, dtype, self.layers.ranks)
        if not self.spec.layer_caches:
            return attention_spec(*settings)
        [group] = cache_layout(*settings).groups
        return group.spec

    def hidden(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Hidden states of one batch: [tokens, hidden_size]. Chunks of one token must come first."""
        batch = self._batch(chunks)
        with torch.inference_mode():
            plan = self._attention.plan(batch)
            run = ForwardPass(batch=_bare(batch), attention=self._attention, plan=plan, pool=self._pool)
            return self.model.forward(run)

    def logits(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits of all tokens of one batch: [tokens, vocab_size]."""
        with torch.inference_mode():
            return self.model.logits(self.hidden(chunks))

    def prompt_logits(self, sequence: int, chunks: Sequence[int] = ()) -> torch.Tensor:
        """Logits of all tokens of a prompt, computed in chunks of these lengths, by default in one."""
        parts, start = [], 0
        for count in chunks or [len(self.prompts[sequence])]:
            parts.append(self.logits([(sequence, start, count)]))
            start += count
        assert start == len(self.prompts[sequence])
        return torch.cat(parts)

    def _batch(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        counts = np.array([count for _, _, count in chunks], np.int32)
        contexts = np.array([start + count for _, start, count in chunks], np.int32)
        positions = [np.arange(start, start + count) for _, start, count in chunks]
        slots = [
            self._tables[sequence][at // self._block_size].astype(np.int64) * self._block_size + at % self._block_size
            for (sequence, _, _), at in zip(chunks, positions, strict=True)
        ]
        tables = self._tables[[sequence for sequence, _, _ in chunks]]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tokens = [token for sequence, start, count in chunks for token in self.prompts[sequence][start : start + count]]
        decodes = 0
        while decodes < len(chunks) and chunks[decodes][2] == 1 and chunks[decodes][1] > 0:
            decodes += 1
        return ForwardBatch(
            tokens=torch.tensor(tokens),
            positions=torch.from_numpy(np.concatenate(positions)),
            slots=torch.from_numpy(np.concatenate(slots)),
            query_starts=torch.from_numpy(starts),
            context_lens=torch.from_numpy(contexts),
            block_tables=torch.from_numpy(tables),
            logit_rows=torch.arange(len(tokens)),
            num_decodes=decodes,
            query_lens_host=counts,
            context_lens_host=contexts,
            block_tables_host=tables,
        )


def _bare(batch: ForwardBatch) -> ForwardBatch:
    """The batch with only what a model may use, as between the graph breaks of piecewise CUDA graphs."""
    nothing: Any = None
    return attrs.evolve(
        batch,
        query_starts=nothing,
        context_lens=nothing,
        block_tables=nothing,
        logit_rows=nothing,
        num_decodes=nothing,
        query_lens_host=nothing,
        context_lens_host=nothing,
        block_tables_host=nothing,
    )

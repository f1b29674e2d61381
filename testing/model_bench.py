"""A model with its own KV cache and states, which computes the batches that a test asks for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from engine.core.attention import AttentionBackend, AttentionSpec, CacheLayout, ForwardBatch, KVPool, StatePool
from engine.core.config import EngineConfig
from engine.core.distributed import RankGroup
from engine.core.layers import LayerFactory
from engine.core.models import ForwardPass, Model, StateShape
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
    """One rank of a model on the CPU. Slots of the KV cache and rows of states hold NaN until they are written."""

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
        layout = self._layout(dtype, 1 if group is None else group.ranks)
        self.layers = LayerFactory(
            dtype=dtype, device="cpu", group=group, quant=quant, stored=source.names, cache=layout, **settings
        )
        self.model = model(checkpoint.config, self.layers, options)
        with torch.inference_mode():
            load_weights(self.layers, source, threads=1)
        self._block_size = EngineConfig().cache.block_size
        num_blocks = -(-MAX_TOKENS // self._block_size)
        blocks = np.arange(num_blocks * len(prompts), dtype=np.int32)[::-1].copy()
        self._tables = blocks.reshape(len(prompts), num_blocks)
        self._groups: list[tuple[Any, Any]] = []
        """The pool and the attention backend of each cache group; a group of states has None for a backend."""
        if layout is None:
            shape = self._attention_spec(dtype)
            self._add_attention(shape, range(shape.num_layers))
            return
        for group_of_keys in layout.groups:
            self._add_attention(group_of_keys.spec, group_of_keys.layers)
        for group_of_states in layout.states:
            states = StatePool(group_of_states.tensors, len(group_of_states.layers), len(prompts), "cpu")
            for tensor in (tensor for tensors in states.layers for tensor in tensors if tensor.is_floating_point()):
                tensor.fill_(torch.nan)
            self._groups.append((states, None))

    def _layout(self, dtype: str, ranks: int) -> CacheLayout | None:
        """The cache groups of a model with states; None for a model without any."""
        if not any(isinstance(cache, StateShape) for cache in self.spec.layer_caches):
            return None
        return cache_layout(self.spec, EngineConfig(), dtype, self.spec.max_len, dtype, ranks)

    def _attention_spec(self, dtype: str) -> AttentionSpec:
        """The attention of all layers. Those of `layer_caches` must be of one cache group."""
        settings = (self.spec, EngineConfig(), dtype, self.spec.max_len, dtype, self.layers.ranks)
        if not self.spec.layer_caches:
            return attention_spec(*settings)
        [group] = cache_layout(*settings).groups
        return group.spec

    def _add_attention(self, spec: AttentionSpec, layers: Sequence[int]) -> None:
        """Add a cache group of keys and values."""
        pool = KVPool(spec, self._tables.size, "cpu")
        for tensor in (*pool.keys, *pool.values):
            tensor.fill_(torch.nan)
        attention = _torch_attention()(spec, pool, None)
        if any(spec.sinks):
            sinks = {reader.layer: reader.weight for reader in self.layers.sinks}
            attention.set_sinks([sinks.get(layer) for layer in layers])
        self._groups.append((pool, attention))

    def hidden(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Hidden states of one batch: [tokens, hidden_size]. Chunks of one token must come first."""
        batch = self._batch(chunks)
        with torch.inference_mode():
            runs = []
            for pool, attention in self._groups:
                own, plan = (batch, None) if attention is None else (_bare(batch), attention.plan(batch))
                runs.append(ForwardPass(batch=own, attention=attention, plan=plan, pool=pool))
            return self.model.forward(runs[0] if len(runs) == 1 else attrs.evolve(runs[0], groups=tuple(runs)))

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
            state_rows=torch.tensor([sequence for sequence, _, _ in chunks]),
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
        state_rows=nothing,
    )

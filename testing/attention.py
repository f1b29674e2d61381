"""Conformance suite for attention backends: compares them with dense attention in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest
import torch

from engine.core.attention import AttentionBackend, AttentionPair, AttentionSpec, GraphSlot
from engine.core.device import DeviceInfo
from engine.core.quant import FLOAT8
from engine.testing.attention_cases import (
    BATCHES,
    LONG_BATCHES,
    Case,
    Lengths,
    graph_batch,
    invalidate_behind_windows,
    only,
    pack,
    random_case,
    unpack,
    unwritten,
)
from engine.testing.attention_rotation import RotationConformance

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Type of queries -> maximum relative norm of the error."""


class AttentionConformance(RotationConformance):
    """Derive a class named Test... from this one and set `backend`.

    Pool slots beyond a sequence's context hold NaN, and so do unused blocks. A feature that the backend refuses is
    skipped with its refusal; the plain case must not be refused.
    """

    backend: ClassVar[type[AttentionBackend[Any, Any]] | AttentionPair]
    device: ClassVar[DeviceInfo | str] = "cpu"
    """A string names a device without further properties."""
    dtype: ClassVar[str] = "float32"
    """Dtype of queries and outputs, and of the KV cache where it is not float8."""
    options: ClassVar[Any] = None
    """Options of the backend; None: the defaults of its options_class."""
    longest: ClassVar[int] = 16384
    """Maximum context length tested, for backends that take minutes for long contexts."""

    @pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=lambda heads: f"{heads[0]}:{heads[1]}")
    @pytest.mark.parametrize("name", BATCHES)
    def test_batch(self, name: str, heads: tuple[int, int]) -> None:
        """Ragged batches of each kind, for several ratios of query heads to KV heads."""
        self.check(self.spec(num_heads=heads[0], num_kv_heads=heads[1]), BATCHES[name])

    @pytest.mark.parametrize("seed", range(8))
    def test_random_batch(self, seed: int) -> None:
        """Batches of random lengths."""
        pick = random.Random(seed)
        decodes = [(pick.randint(1, 90), 1) for _ in range(pick.randint(0, 6))]
        prefills = [(pick.choice([0, 0, pick.randint(1, 40)]), pick.randint(1, 40)) for _ in range(pick.randint(0, 4))]
        self.check(self.spec(), tuple(decodes + prefills) or ((0, 1),), seed=seed)

    @pytest.mark.parametrize("block_size", [1, 2, 16, 32, 64, 128, 256])
    def test_page_size(self, block_size: int) -> None:
        """Every block size that the backend declares."""
        sizes = self.backend.block_sizes
        if sizes is not None and block_size not in sizes:
            pytest.skip(f"reads blocks of {sizes}")
        self.check(self.spec(block_size=block_size), BATCHES["mixed"])

    @pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
    def test_group_size(self, group: int) -> None:
        """Numbers of query heads per KV head that models have."""
        self.check(self.spec(num_layers=1, num_heads=group, num_kv_heads=1, sliding_windows=(None,)), BATCHES["mixed"])

    @pytest.mark.parametrize("context", [1, 127, 128, 129, 1023, 4096, 16384])
    def test_context(self, context: int) -> None:
        """Short and long contexts: a decode next to a short one, and the last chunk of a prompt."""
        if context > self.longest:
            pytest.skip(f"contexts of up to {self.longest}")
        spec = self.spec(num_layers=1, max_len=context, sliding_windows=(None,))
        new = min(context, 17)
        self.check(spec, ((context - 1, 1), (min(context, 3), 1), (context - new, new)) if context > 1 else ((0, 1),))

    @pytest.mark.parametrize("head_dim", [32, 64, 128])
    def test_head_dim(self, head_dim: int) -> None:
        """Head dimensions that models have."""
        self.check(self.spec(head_dim=head_dim, scale=head_dim**-0.5), BATCHES["mixed"])

    @pytest.mark.parametrize("name", BATCHES)
    @pytest.mark.parametrize("window", [1, 4, 16, 1000])
    def test_sliding_window(self, window: int, name: str) -> None:
        """A window in every layer."""
        self.check(self.spec(sliding_windows=(window, window)), BATCHES[name])

    def test_layers_of_different_windows(self) -> None:
        """Full attention in one layer, a window in the next, under one plan."""
        self.check(self.spec(sliding_windows=(None, 8)), BATCHES["mixed"])

    @pytest.mark.parametrize("float8", [False, True], ids=["plain", "float8"])
    @pytest.mark.parametrize("name", LONG_BATCHES)
    def test_blocks_behind_the_window(self, name: str, float8: bool) -> None:
        """Blocks that no query's window reaches may hold NaN: the sequence gave them up, and another may have them."""
        changes = {"kv_dtype": FLOAT8} if float8 else {}
        spec = self.spec(sliding_windows=(4, 20), **changes)
        self._skip_if_refused(spec)
        case = self.make(spec, LONG_BATCHES[name])
        invalidate_behind_windows(case, spec)
        for layer, out in enumerate(self.run(spec, case)):
            self._close(out, case.expected[layer], f"layer {layer}")

    @pytest.mark.parametrize("name", BATCHES)
    def test_softcap(self, name: str) -> None:
        """Scores capped by tanh."""
        self.check(self.spec(softcap=2.0), BATCHES[name])

    @pytest.mark.parametrize("name", ["chunked prefill", "mixed"])
    def test_sinks(self, name: str) -> None:
        """Attention sinks in one layer, none in the next, next to windows."""
        self.check(self.spec(sinks=(True, False), sliding_windows=(8, None)), BATCHES[name])

    @pytest.mark.parametrize("name", [*BATCHES, *LONG_BATCHES])
    def test_latent(self, name: str) -> None:
        """A cache of keys alone, whose first numbers are the values, for all query heads."""
        self.check(self.latent_spec(), {**BATCHES, **LONG_BATCHES}[name])

    @pytest.mark.parametrize("heads", [1, 4, 8, 16, 20])
    def test_latent_heads(self, heads: int) -> None:
        """Numbers of query heads that a rank has."""
        self.check(self.latent_spec(num_heads=heads, num_layers=1, sliding_windows=(None,)), BATCHES["mixed"])

    @pytest.mark.parametrize(("latent", "rotated"), [(32, 8), (256, 32), (512, 64)])
    def test_latent_sizes(self, latent: int, rotated: int) -> None:
        """Sizes of the two parts of a key, up to those that models have."""
        size = latent + rotated
        spec = self.latent_spec(head_dim=size, value_head_dim=latent, scale=size**-0.5)
        self.check(spec, BATCHES["mixed"])

    def test_latent_strided_inputs(self) -> None:
        """q, k and v are views of one tensor."""
        self._check_strided(self.latent_spec())

    @pytest.mark.parametrize("name", BATCHES)
    def test_latent_forward_into(self, name: str) -> None:
        """As test_forward_into, with results of the size of a latent."""
        self._check_forward_into(self.latent_spec(), name)

    def test_latent_one_plan_for_changing_buffers(self) -> None:
        """As test_one_plan_for_changing_buffers, over a latent cache."""
        self._check_changing_buffers(self.latent_spec())

    def test_sinks_with_a_soft_cap_over_float8(self) -> None:
        """Sinks are not capped, and not scaled by the key scale."""
        self.check(self.spec(sinks=(True, True), softcap=2.0, kv_dtype=FLOAT8), BATCHES["mixed"])

    def test_scale(self) -> None:
        """A scale that is not 1 / sqrt(head_dim)."""
        self.check(self.spec(scale=0.03), BATCHES["mixed"])

    def test_a_sequence_does_not_depend_on_its_batch(self) -> None:
        """Other sequences of a batch change a result only by rounding."""
        spec = self.spec()
        case = self.make(spec, BATCHES["mixed"])
        together = self.run(spec, case)[0]
        start = 0
        for index, (cached, new) in enumerate(BATCHES["mixed"]):
            alone = self.run(spec, only(case, index, decodes=cached > 0 and new == 1))[0]
            self._close(together[start : start + new], alone.double().cpu(), "alone")
            start += new

    def test_strided_inputs(self) -> None:
        """q, k and v are views of one tensor, as after a merged projection."""
        self._check_strided(self.spec())

    def _check_strided(self, spec: AttentionSpec) -> None:
        self._skip_if_refused(spec)
        case = self.make(spec, BATCHES["mixed"])
        views = [unpack(spec, pack(spec, layer)) for layer in case.inputs]
        for found, expected in zip(self.run(spec, attrs.evolve(case, inputs=views)), case.expected, strict=True):
            self._close(found, expected, "strided")

    @pytest.mark.parametrize("name", BATCHES)
    def test_forward_into(self, name: str) -> None:
        """forward_into writes the same result into rows of a larger buffer, and no other rows."""
        self._check_forward_into(self.spec(), name)

    def _check_forward_into(self, spec: AttentionSpec, name: str) -> None:
        self._skip_if_refused(spec)
        case = self.make(spec, BATCHES[name])
        backend = self._backend(spec, case)
        tokens = len(case.batch.tokens)
        with torch.inference_mode():
            plan = backend.plan(case.batch)
            for layer, inputs in enumerate(case.inputs):
                buffer = inputs[0].new_full((3 * tokens, spec.num_heads, spec.output_dim), 3.0)
                with unwritten(case.batch, "forward_into()"):
                    backend.forward_into(layer, *inputs, plan, buffer[tokens : 2 * tokens])
                self._close(buffer[tokens : 2 * tokens], case.expected[layer], f"forward_into, layer {layer}")
                rest = torch.cat((buffer[:tokens], buffer[2 * tokens :]))
                assert bool((rest == 3.0).all()), f"forward_into, layer {layer}: rows beyond `out` were written"

    @pytest.mark.parametrize("name", BATCHES)
    def test_float8_cache(self, name: str) -> None:
        """Quantized values, with different scales for keys, values and layers."""
        self.check(self.spec(kv_dtype=FLOAT8), BATCHES[name])

    @pytest.mark.parametrize(
        "changes",
        [
            {"sliding_windows": (8, None)},
            {"softcap": 2.0},
            {"head_dim": 128, "scale": 0.08, "num_heads": 14},
            {"head_dim": 256, "num_layers": 1, "sliding_windows": (None,)},
            {"block_size": 64, "num_kv_heads": 4},
        ],
        ids=str,
    )
    def test_float8_cache_of_other_shapes(self, changes: dict[str, Any]) -> None:
        """A float8 cache with windows, soft caps, other heads and block sizes."""
        if self.backend.block_sizes is not None and changes.get("block_size", 0) not in (0, *self.backend.block_sizes):
            pytest.skip(f"reads blocks of {self.backend.block_sizes}")
        self.check(self.spec(kv_dtype=FLOAT8, **changes), BATCHES["mixed"])

    @pytest.mark.parametrize("window", [None, 20])
    def test_one_plan_for_changing_buffers(self, window: int | None) -> None:
        """A plan made for a graph stays valid while lengths, tables and queries change in place.

        On a GPU the passes are replays of one captured graph; on other devices they are calls. Rows beyond the
        sequences of a pass are padding: one token in the scratch block, whose output is ignored. Between two passes the
        backend serves batches of other plans.
        """
        self._check_changing_buffers(self.spec(sliding_windows=(window, window)))

    def test_one_plan_for_changing_buffers_over_float8(self) -> None:
        """As test_one_plan_for_changing_buffers, with quantized values."""
        self._check_changing_buffers(self.spec(kv_dtype=FLOAT8))

    def _check_changing_buffers(self, spec: AttentionSpec) -> None:
        if self.backend.graphs not in ("decode", "any"):
            pytest.skip("captures no graphs")
        self._skip_if_refused(spec)
        lengths = tuple((context - 1, 1) for context in (2, 15, 16, 17, 90, 130, 200, 255, 33, 64))
        case = self.make(spec, lengths)
        rows = 6
        batch = graph_batch(spec, case.pool, rows)
        packed = [pack(spec, tensors)[:rows].zero_() for tensors in case.inputs]
        inputs = [unpack(spec, layer) for layer in packed]
        backend = self._backend(spec, case)
        if backend.graphs == "none":
            pytest.skip("captures no graphs of such layers")
        with unwritten(batch, "plan() of a graph"):
            plan = backend.plan(batch, GraphSlot(num_sequences=rows))
        replay = self._captured(lambda: [backend.forward(layer, *each, plan) for layer, each in enumerate(inputs)])
        for chosen in ([0, 1, 2, 3, 4, 5], [9, 7, 6], [8], [7, 7, 0, 5, 3, 6]):
            count = len(chosen)
            batch.context_lens.fill_(1)
            batch.block_tables.fill_(case.pool.scratch_block)
            batch.context_lens[:count] = case.batch.context_lens[chosen]
            batch.block_tables[:count, : case.batch.block_tables.shape[1]] = case.batch.block_tables[chosen]
            for layer, tensors in enumerate(case.inputs):
                packed[layer][:count] = pack(spec, tensors)[chosen]
            self._serve_another(backend, spec, case)
            with unwritten(batch, "forward() in a graph"):
                outs = replay()
            for layer, out in enumerate(outs):
                self._close(out[:count], case.expected[layer][chosen], f"layer {layer}, sequences {chosen}")

    def _serve_another(self, backend: AttentionBackend[Any, Any], spec: AttentionSpec, case: Case) -> None:
        """Serve other batches with the same backend: one without a graph, and the plan of a smaller graph."""
        with torch.inference_mode():
            plan = backend.plan(case.batch)
            for layer, inputs in enumerate(case.inputs):
                backend.forward(layer, *inputs, plan)
            backend.plan(graph_batch(spec, case.pool, 2), GraphSlot(num_sequences=2))

    def test_nothing_is_changed(self) -> None:
        """The backend does not write to the pool or the inputs, which core uses again; `run` checks the batch."""
        spec = self.spec()
        case = self.make(spec, BATCHES["mixed"])
        tensors = [*case.pool.keys, *case.pool.values, *(tensor for layer in case.inputs for tensor in layer)]
        before = [tensor.clone() for tensor in tensors]
        self.run(spec, case)
        for old, new in zip(before, tensors, strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)

    def test_the_plain_case_is_not_refused(self) -> None:
        """The backend accepts plain attention; refusing everything would pass all other tests."""
        refusal = self.backend.refuses(self.spec(), self._device())
        assert refusal is None, f"{self.backend} refuses plain attention in {self.dtype}: {refusal}"

    def spec(self, **changes: Any) -> AttentionSpec:
        """Return the attention of a small model: two layers, four query heads, two KV heads."""
        spec = AttentionSpec(
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            scale=0.125,
            dtype=self.dtype,
            kv_dtype=self.dtype,
            block_size=self.backend.block_sizes[0] if self.backend.block_sizes else 16,
            max_len=256,
            sliding_windows=(None, None),
        )
        return attrs.evolve(spec, **changes)

    def latent_spec(self, **changes: Any) -> AttentionSpec:
        """Return the attention of a small model with a latent cache."""
        return self.spec(**{"num_kv_heads": 1, "value_head_dim": 48, "latent": True, **changes})

    def check(self, spec: AttentionSpec, lengths: Lengths, seed: int = 0) -> None:
        """Run one batch through all layers and compare; skip if the backend refuses."""
        self._skip_if_refused(spec)
        case = self.make(spec, lengths, seed)
        for layer, out in enumerate(self.run(spec, case)):
            assert out.dtype == getattr(torch, spec.dtype), f"layer {layer} returned {out.dtype}"
            self._close(out, case.expected[layer], f"layer {layer}")

    def run(self, spec: AttentionSpec, case: Case) -> list[torch.Tensor]:
        """Return the backend's output per layer."""
        backend = self._backend(spec, case)
        with torch.inference_mode():
            with unwritten(case.batch, "plan()"):
                plan = backend.plan(case.batch)
            with unwritten(case.batch, "forward()"):
                return [backend.forward(layer, *inputs, plan) for layer, inputs in enumerate(case.inputs)]

    def _skip_if_refused(self, spec: AttentionSpec) -> None:
        refusal = self.backend.refuses(spec, self._device())
        if refusal is not None:
            assert isinstance(refusal, str), f"refuses() answered {refusal!r}, not a sentence"
            assert refusal, "refuses() answered an empty string"
            pytest.skip(refusal)
        if spec.kv_dtype == FLOAT8 and not self.backend.reads_float8:
            pytest.skip(f"reads no {FLOAT8}")
        if any(spec.sinks) and not self.backend.reads_sinks:
            pytest.skip("computes no attention sinks")
        if spec.latent and not self.backend.reads_latent:
            pytest.skip("reads no latent cache")

    def _backend(self, spec: AttentionSpec, case: Case) -> AttentionBackend[Any, Any]:
        options = self.options
        if options is None and self.backend.options_class is not None:
            options = self.backend.options_class()
        backend = self.backend(spec, case.pool, options)
        if case.sinks:
            backend.set_sinks(case.sinks)
        return backend

    def _captured(self, step: Callable[[], list[torch.Tensor]]) -> Callable[[], list[torch.Tensor]]:
        """Return a function that replays `step` from a CUDA graph; on devices without graphs, `step` itself."""
        if self._device().type != "cuda":
            return step
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels before the capture, as a runner does
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = step()

        def replay() -> list[torch.Tensor]:
            graph.replay()
            return outs

        return replay

    def make(self, spec: AttentionSpec, lengths: Lengths, seed: int = 0) -> Case:
        """Make a case of random keys, values and queries; see `random_case`."""
        return random_case(spec, lengths, self._device().torch_name, seed)

    def _close(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        error = float((found.double().cpu() - expected).norm() / expected.norm())
        limit = TOLERANCE[self.dtype]
        assert error <= limit, (
            f"{what}: relative error {error:.2e}, more than {limit:.0e} (NaN: an unused slot was read)"
        )

    def _device(self) -> DeviceInfo:
        if isinstance(self.device, DeviceInfo):
            return self.device
        kind, _, index = self.device.partition(":")
        return DeviceInfo(type="cuda" if kind == "cuda" else "cpu", index=int(index or 0))

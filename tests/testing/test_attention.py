"""The attention suite finds the mistakes it is there to find, and passes a correct backend."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from engine.core.attention.base import AttentionBackend, AttentionSpec
from engine.core.quant.float8 import UNSCALED, KVScales
from engine.testing.attention import AttentionConformance
from engine.testing.attention_cases import BATCHES, dense_attention


class Plain(AttentionBackend[Any, Any]):
    """By the definition, in the type of the inputs; faulty classes below change one thing."""

    api = "1"
    reads_float8 = True

    @classmethod
    def refuses(cls, spec: Any, device: Any) -> Any:
        return None

    def __init__(self, spec: AttentionSpec, pool: Any, options: Any) -> None:
        self.spec = spec
        self.pool = pool

    def plan(self, batch: Any, graph: Any = None) -> Any:
        return batch

    def slots(self, batch: Any, row: int, context: int) -> torch.Tensor:
        at = torch.arange(context)
        return (
            batch.block_tables[row].long()[at // self.spec.block_size] * self.spec.block_size
            + at % self.spec.block_size
        )

    def spec_of(self, layer: int) -> tuple[AttentionSpec, int | None]:
        return self.spec, self.spec.sliding_windows[layer]

    def scales_of(self, layer: int) -> KVScales:
        return self.pool.scales[layer]

    def forward(self, layer: Any, q: Any, k: Any, v: Any, plan: Any) -> Any:
        scales = self.scales_of(layer)
        keys, values = self.pool.keys[layer].flatten(0, 1), self.pool.values[layer].flatten(0, 1)
        outs = []
        spec, window = self.spec_of(layer)
        for row, context in enumerate(plan.context_lens.tolist()):
            start, end = plan.query_starts[row : row + 2].tolist()
            slots = self.slots(plan, row, context)
            k, v = keys[slots].double() * scales.key, values[slots].double() * scales.value
            outs.append(dense_attention(q[start:end], k, v, spec, window))
        return torch.cat(outs).to(q.dtype)


class TestPlain(AttentionConformance):
    backend = Plain


class TestPlainHalf(AttentionConformance):
    backend = Plain
    dtype = "bfloat16"


class Unscaled(Plain):
    def scales_of(self, layer: Any) -> Any:
        return UNSCALED


class OneScale(Plain):
    def scales_of(self, layer: Any) -> Any:
        return self.pool.scales[0]


class KeyScaleAlone(Plain):
    def scales_of(self, layer: Any) -> Any:
        return KVScales(key=self.pool.scales[layer].key, value=self.pool.scales[layer].key)


class Windowless(Plain):
    def spec_of(self, layer: Any) -> Any:
        return self.spec, None


class OneWindow(Plain):
    def spec_of(self, layer: Any) -> Any:
        return self.spec, self.spec.sliding_windows[-1]


class WideWindow(Plain):
    def spec_of(self, layer: Any) -> Any:
        window = self.spec.sliding_windows[layer]
        return self.spec, window and window + 1


class Capless(Plain):
    def spec_of(self, layer: Any) -> Any:
        return attrs.evolve(self.spec, softcap=None), self.spec.sliding_windows[layer]


class OwnScale(Plain):
    def spec_of(self, layer: Any) -> Any:
        return attrs.evolve(self.spec, scale=self.spec.head_dim**-0.5), self.spec.sliding_windows[layer]


class Contiguous(Plain):
    """Takes the blocks of a sequence to be adjacent."""

    def slots(self, batch: Any, row: Any, context: Any) -> Any:
        return int(batch.block_tables[row, 0]) * self.spec.block_size + torch.arange(context)


class Greedy(Plain):
    """Multiplies whole blocks and masks afterwards, so that NaN beyond the context comes through."""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, plan: Any) -> Any:
        whole = self.pool.values[layer].flatten(0, 1)[self.slots(plan, 0, self.spec.block_size)]
        return super().forward(layer, q, k, v, plan) + (whole.sum() * 0).to(q.dtype)


class Weighing(Plain):
    """Multiplies values behind the window by a weight of 0, so that NaN comes through."""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, plan: Any) -> Any:
        context = int(plan.context_lens[0])
        whole = self.pool.values[layer].flatten(0, 1)[self.slots(plan, 0, context)]
        return super().forward(layer, q, k, v, plan) + (whole.sum() * 0).to(q.dtype)


class Writer(Plain):
    def forward(self, layer: Any, q: Any, k: Any, v: Any, plan: Any) -> Any:
        out = super().forward(layer, q, k, v, plan)
        q.zero_()
        return out


class Neighbours(Plain):
    """Lets the batch's first sequence into all others."""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, plan: Any) -> Any:
        return super().forward(layer, q, k, v, plan) + (0.01 * q[0] if plan.num_sequences > 1 else 0)


class Dense(Plain):
    """Takes the queries of adjacent tokens to be adjacent."""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, plan: Any) -> Any:
        return super().forward(layer, q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1)), k, v, plan)


class Replayed(Plain):
    graphs = "decode"


class Remembering(Replayed):
    """Plans with what the buffers held when the graph was captured."""

    def plan(self, batch: Any, graph: Any = None) -> Any:
        return attrs.evolve(batch, context_lens=batch.context_lens.clone(), block_tables=batch.block_tables.clone())


class Worst(Replayed):
    """Plans with the host's lengths."""

    def plan(self, batch: Any, graph: Any = None) -> Any:
        return attrs.evolve(batch, context_lens=torch.from_numpy(batch.context_lens_host))


class Shared(Replayed):
    """Has one place for the lengths and tables of all plans."""

    def plan(self, batch: Any, graph: Any = None) -> None:
        self.planned = batch

    def forward(self, layer: Any, q: Any, k: Any, v: Any, plan: Any) -> Any:
        return super().forward(layer, q, k, v, self.planned)


class Elsewhere(Plain):
    def forward_into(self, layer: Any, q: Any, k: Any, v: Any, plan: Any, out: Any) -> None:
        self.forward(layer, q, k, v, plan)


class Overflowing(Plain):
    """Writes whole tiles of 64 rows."""

    def forward_into(self, layer: Any, q: Any, k: Any, v: Any, plan: Any, out: Any) -> None:
        super().forward_into(layer, q, k, v, plan, out)
        rows = min(64, out.untyped_storage().nbytes() // out[0].nbytes - out.storage_offset() // out[0].numel())
        out.as_strided((rows, *out.shape[1:]), out.stride())[len(out) :] = 0


class Sorting(Plain):
    """Puts the batch's host lengths in order, in place."""

    def plan(self, batch: Any, graph: Any = None) -> Any:
        batch.context_lens_host.sort()
        return batch


class Zeroing(Plain):
    """Writes to one tensor of the batch, at the call that is named."""

    written, at = "tokens", "plan"

    def write(self, batch: Any, call: str) -> None:
        if call == self.at:
            getattr(batch, self.written)[:] = 0

    def plan(self, batch: Any, graph: Any = None) -> Any:
        plan = attrs.evolve(batch, **{name: getattr(batch, name).clone() for name in ("query_starts", "context_lens")})
        self.write(batch, "plan")
        return batch, plan

    def forward(self, layer: Any, q: Any, k: Any, v: Any, plan: Any) -> Any:
        batch, own = plan
        out = super().forward(layer, q, k, v, own)
        self.write(batch, "forward")
        return out

    def forward_into(self, layer: Any, q: Any, k: Any, v: Any, plan: Any, out: Any) -> None:
        out.copy_(self.forward(layer, q, k, v, plan))
        self.write(plan[0], "forward_into")


class Replacing(Plain):
    """Gives the batch another tensor."""

    def plan(self, batch: Any, graph: Any = None) -> Any:
        batch.tokens = torch.zeros_like(batch.tokens)
        return batch


class Widened(Plain):
    def forward(self, layer: Any, q: Any, k: Any, v: Any, plan: Any) -> Any:
        return super().forward(layer, q, k, v, plan).double()


class Refusing(Plain):
    @classmethod
    def refuses(cls, spec: Any, device: Any) -> Any:
        return "no"


class Vague(Plain):
    @classmethod
    def refuses(cls, spec: Any, device: Any) -> Any:
        return True


@pytest.mark.parametrize(
    ("backend", "test"),
    [
        (Windowless, lambda suite: suite.test_sliding_window(4, "mixed")),
        (Windowless, lambda suite: suite.test_sliding_window(4, "decode")),
        (OneWindow, lambda suite: suite.test_layers_of_different_windows()),
        (WideWindow, lambda suite: suite.test_sliding_window(16, "prefill")),
        (Capless, lambda suite: suite.test_softcap("mixed")),
        (OwnScale, lambda suite: suite.test_scale()),
        (Contiguous, lambda suite: suite.test_batch("mixed", (4, 2))),
        (Greedy, lambda suite: suite.test_batch("prefill", (4, 4))),
        (Weighing, lambda suite: suite.test_blocks_behind_the_window("decode", False)),
        (Weighing, lambda suite: suite.test_blocks_behind_the_window("chunked prefill", False)),
        (Writer, lambda suite: suite.test_nothing_is_changed()),
        (Neighbours, lambda suite: suite.test_a_sequence_does_not_depend_on_its_batch()),
        (Dense, lambda suite: suite.test_strided_inputs()),
        (Remembering, lambda suite: suite.test_one_plan_for_changing_buffers(None)),
        (Worst, lambda suite: suite.test_one_plan_for_changing_buffers(None)),
        (Shared, lambda suite: suite.test_one_plan_for_changing_buffers(None)),
        (Elsewhere, lambda suite: suite.test_forward_into("prefill")),
        (Overflowing, lambda suite: suite.test_forward_into("decode")),
        (Sorting, lambda suite: suite.test_nothing_is_changed()),
        (Unscaled, lambda suite: suite.test_float8_cache("mixed")),
        (OneScale, lambda suite: suite.test_float8_cache("decode")),
        (KeyScaleAlone, lambda suite: suite.test_float8_cache("prefill")),
        (Widened, lambda suite: suite.test_batch("decode", (4, 2))),
        (Refusing, lambda suite: suite.test_the_plain_case_is_not_refused()),
        (Vague, lambda suite: suite.test_batch("decode", (4, 2))),
    ],
    ids=lambda value: getattr(value, "__name__", "") if isinstance(value, type) else "",
)
def test_a_fault_is_found(backend: type[AttentionBackend[Any, Any]], test: Any) -> None:
    suite = type("Suite", (AttentionConformance,), {"backend": backend})()
    with pytest.raises((AssertionError, IndexError)):
        test(suite)


@pytest.mark.parametrize(
    "written", ["tokens", "positions", "slots", "query_starts", "context_lens", "logit_rows", "query_lens_host"]
)
@pytest.mark.parametrize("at", ["plan", "forward"])
def test_suite_names_what_is_written_when_a_backend_writes_to_the_batch(written: str, at: str) -> None:
    backend = type("Writing", (Zeroing,), {"written": written, "at": at})
    suite = type("Suite", (AttentionConformance,), {"backend": backend})()
    with pytest.raises(AssertionError, match=rf"{at}\(\) writes to the batch: {written};"):
        suite.test_batch("mixed", (4, 2))


def test_suite_names_what_is_written_when_a_backend_replaces_a_tensor_of_the_batch() -> None:
    suite = type("Suite", (AttentionConformance,), {"backend": Replacing})()
    with pytest.raises(AssertionError, match=r"plan\(\) writes to the batch: tokens;"):
        suite.test_batch("prefill", (4, 2))


def test_suite_checks_the_batch_when_results_are_written_into_a_buffer_and_when_a_plan_is_that_of_a_graph() -> None:
    writing = type("Writing", (Zeroing,), {"at": "forward_into"})
    with pytest.raises(AssertionError, match=r"forward_into\(\) writes to the batch: tokens;"):
        type("Suite", (AttentionConformance,), {"backend": writing})().test_forward_into("decode")
    writing = type("Writing", (Zeroing,), {"graphs": "decode"})
    with pytest.raises(AssertionError, match=r"plan\(\) of a graph writes to the batch: tokens;"):
        type("Suite", (AttentionConformance,), {"backend": writing})().test_one_plan_for_changing_buffers(None)


def test_a_plan_that_holds_only_the_buffers_serves_a_graph() -> None:
    type("Suite", (AttentionConformance,), {"backend": Replayed})().test_one_plan_for_changing_buffers(20)


def test_a_backend_that_does_not_say_it_reads_float8_is_not_asked_to() -> None:
    suite = type("Suite", (AttentionConformance,), {"backend": type("Old", (Plain,), {"reads_float8": False})})()
    with pytest.raises(pytest.skip.Exception, match="reads no float8"):
        suite.test_float8_cache("mixed")


def test_a_refused_feature_is_skipped_with_its_sentence() -> None:
    suite = type("Suite", (AttentionConformance,), {"backend": Refusing})()
    with pytest.raises(pytest.skip.Exception, match="no"):
        suite.test_softcap("mixed")


def test_the_reference_agrees_with_an_independent_formula() -> None:
    torch.manual_seed(0)
    suite = TestPlain()
    spec = suite.spec(num_heads=4, num_kv_heads=2)
    q, k, v = (torch.randn(9, heads, spec.head_dim) for heads in (4, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.double().transpose(0, 1) for tensor in (q, k, v)), is_causal=True, scale=spec.scale, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(dense_attention(q, k, v, spec, None), expected)


def test_batches_cover_prefill_decode_and_both() -> None:
    assert all(new == 1 and cached for cached, new in BATCHES["decode"])
    assert all(not cached for cached, _ in BATCHES["prefill"])
    assert {new == 1 for _, new in BATCHES["mixed"]} == {True, False}

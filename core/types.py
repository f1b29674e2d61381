"""Plain data passed between front end, scheduler and runner: requests, steps, results, outputs, statistics.

All are frozen classes of ints, floats, strings and tuples, so that each can be sent to another process as msgpack
(core/executors/wire.py). They are attrs classes except Output: there is one Output per token, and a msgspec.Struct is
created, encoded and decoded in a fraction of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from reprlib import repr as shortened
from typing import Any, Final, Literal

import msgspec
from attrs import evolve, field, frozen

from engine.core.errors import InvalidRequestError
from engine.core.grammars.grammar import Grammar
from engine.core.profiling.cost import ModelCost, Peaks
from engine.core.profiling.live import StepWork
from engine.core.tokens import Tokens

FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_STOP: Final = "stop"
"""A stop token or a stop string ended the output."""
FINISH_LENGTH: Final = "length"
"""max_tokens are generated, or the context is full."""
FINISH_ABORT: Final = "abort"
FINISH_ERROR: Final = "error"
"""The request failed; Output.error says why."""

NO_TOKEN: Final = -1
"""In StepResult.tokens: the sequence's logits were not finite (NaN or infinite), so no token could be sampled."""

MAX_SEED = 2**63 - 1

GREEDY_BELOW_TEMPERATURE = 1e-5
"""At lower temperatures float32 probabilities leave no token but the most likely one."""


def _number(low: float, high: float, *, low_open: bool = False, whole: bool = False) -> Any:
    """An attrs validator: a number in [low, high], or (low, high] with `low_open`, or None if that is the default."""
    kind, kinds = ("a whole number", int) if whole else ("a number", (int, float))

    def check(_: Any, attribute: Any, value: Any) -> None:
        if value is None and attribute.default is None:
            return
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise InvalidRequestError(f"{attribute.name} must be {kind}, not {shortened(value)}", attribute.name)
        above = value > low if low_open else value >= low
        if not (above and value <= high):
            left = "(" if low_open else "["
            raise InvalidRequestError(
                f"{attribute.name} must be in {left}{low}, {high}], not {shortened(value)}", attribute.name
            )

    return check


def _flag(_: Any, attribute: Any, value: Any) -> None:
    """An attrs validator: True or False."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{attribute.name} must be True or False, not {shortened(value)}", attribute.name)


def _stop_strings(value: Any) -> tuple[str, ...]:
    """An attrs converter: one string, or several. Raises InvalidRequestError for anything else, and for ""."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (tuple, list)) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"stop must be a string or a list of strings, not {shortened(value)}", "stop")
    if not all(texts):
        raise InvalidRequestError("a stop string is empty", "stop")
    return tuple(texts)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    """An attrs converter: token ids. Raises InvalidRequestError for anything else."""
    if not isinstance(value, (tuple, list)) or not all(_is_token(token) for token in value):
        raise InvalidRequestError(
            f"stop_token_ids must be a list of token ids from 0 on, not {shortened(value)}", "stop_token_ids"
        )
    return tuple(value)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """An attrs converter: (token, bias) pairs, or a dict. Raises InvalidRequestError for anything else."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (tuple, list)) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs
    ):
        raise InvalidRequestError(
            f"logit_bias must be a dict of token ids to numbers, or a list of such pairs, not {shortened(value)}",
            "logit_bias",
        )
    for token, bias in pairs:
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool) and math.isfinite(bias)
        if not (_is_token(token) and is_number):
            raise InvalidRequestError(
                f"logit_bias of token {shortened(token)} is {shortened(bias)}; give a finite number to a token id from"
                " 0 on",
                "logit_bias",
            )
    return tuple((token, bias) for token, bias in pairs)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _of_type(kind: type, what: str) -> Any:
    """An attrs validator: an instance of `kind`, called `what` in the refusal."""

    def check(_: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidRequestError(f"{attribute.name} must be {what}, not {shortened(value)}", attribute.name)

    return check


def _grammar(_: Any, attribute: Any, value: Any) -> None:
    """An attrs validator: a Grammar, or None."""
    if not isinstance(value, Grammar | None):
        raise InvalidRequestError(f"grammar must be a Grammar(...), not {shortened(value)}", attribute.name)


def _packed(name: str, value: Any) -> Any:
    """A list or tuple of token ids as Tokens. Raises InvalidRequestError for other things in it."""
    if not isinstance(value, (list, tuple)):
        return value
    try:
        return Tokens(value)
    except TypeError:
        wrong = next(each for each in value if not isinstance(each, int))
        raise InvalidRequestError(f"{name} must hold token ids, not {shortened(wrong)}", name) from None
    except OverflowError:
        wrong = max(value, key=abs)
        raise InvalidRequestError(f"the {name} holds {wrong}, which is no token id", name) from None


def _prompt(value: Any) -> Any:
    """An attrs converter."""
    return _packed("prompt", value)


def _prediction(value: Any) -> Any:
    """An attrs converter."""
    return _packed("prediction", value)


def _tokens(value: Sequence[int]) -> Tokens:
    """An attrs converter: packs other sequences of token ids."""
    return value if isinstance(value, Tokens) else Tokens(value)


def _top_k(value: Any) -> Any:
    """An attrs converter: -1 is the name of "all" in other engines."""
    return 0 if isinstance(value, int) and value == -1 else value


@frozen(kw_only=True)
class SamplingParams:
    """How to sample one request's tokens. The defaults sample from the model's distribution, unchanged.

    `stop` may be a single string, `stop_token_ids` a list, and `logit_bias` a dict.
    Raises InvalidRequestError, with `parameter` set, for a value of a wrong type or out of range.
    """

    max_tokens: int | None = field(default=None, validator=_number(1, 2**31, whole=True))
    """Maximum tokens to generate; None: until the context is full."""
    min_tokens: int = field(default=0, validator=_number(0, 2**31, whole=True))
    """Stop tokens and stop strings do not end the request before this many tokens."""
    temperature: float = field(default=1.0, validator=_number(0, 100))
    """0: always the most likely token."""
    top_k: int = field(default=0, converter=_top_k, validator=_number(0, 2**31, whole=True))
    """Keep the k most likely tokens; 0 or -1: all."""
    top_p: float = field(default=1.0, validator=_number(0, 1, low_open=True))
    """Keep the smallest set of most likely tokens whose probabilities add up to at least p."""
    min_p: float = field(default=0.0, validator=_number(0, 1))
    """Drop tokens whose probability is below min_p times that of the most likely token."""
    repetition_penalty: float = field(default=1.0, validator=_number(0.01, 100))
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv:1909.05858)."""
    presence_penalty: float = field(default=0.0, validator=_number(-2, 2))
    """Subtracted once from the logit of each token in the output."""
    frequency_penalty: float = field(default=0.0, validator=_number(-2, 2))
    """Subtracted from the logit of each token once per occurrence in the output."""
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), converter=_logit_bias)
    """(token, bias) pairs: the bias is added to the logit of the token."""
    seed: int | None = field(default=None, validator=_number(0, MAX_SEED, whole=True))
    """The same seed gives the same tokens, whatever else is in the batch; None: a random seed per request."""
    logprobs: int | None = field(default=None, validator=_number(0, 1000, whole=True))
    """Return log probabilities of each sampled token and of this many most likely tokens; None: return none."""
    prompt_logprobs: int | None = field(default=None, validator=_number(0, 1000, whole=True))
    """As `logprobs`, for each prompt token after the first."""
    stop: tuple[str, ...] = field(default=(), converter=_stop_strings)
    """Strings that end the text, and are not part of the text."""
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_stop_token_ids)
    """Tokens that end the request, in addition to the model's end-of-sequence tokens."""
    ignore_eos: bool = field(default=False, validator=_flag)
    """Do not stop at the model's end-of-sequence tokens."""
    skip_special_tokens: bool = field(default=True, validator=_flag)
    """Leave special tokens out of the text."""
    grammar: Grammar | None = field(default=None, validator=_grammar)
    """What the output must match, unless `max_tokens` or `stop` ends it early; None: anything. An output that is
    complete ends, also before `min_tokens` where nothing else may follow."""

    def __attrs_post_init__(self) -> None:
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos would go on where the grammar has ended; leave one of the two out", "ignore_eos"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})", "min_tokens"
            )

    def of_choice(self, choice: int) -> SamplingParams:
        """The parameters of completion number `choice` of several for one prompt: with a seed, each has another."""
        if self.seed is None or choice == 0:
            return self
        return evolve(self, seed=(self.seed + choice) % (MAX_SEED + 1))

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is set, so that which token comes next depends on how often it came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken: by temperature (0 or nearly 0), or by top_k = 1."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_k == 1


@frozen(kw_only=True)
class Request:
    """One prompt to generate from.

    Raises InvalidRequestError, with `parameter` set, for a value of a wrong type.
    """

    id: str = field(validator=_of_type(str, "a string"))
    prompt: Tokens = field(converter=_prompt, validator=_of_type(Tokens, "a tuple of token ids"))
    """Given as a tuple or list, too."""
    params: SamplingParams = field(default=SamplingParams(), validator=_of_type(SamplingParams, "SamplingParams(...)"))
    priority: int = field(default=0, validator=_of_type(int, "a whole number"))
    """Lower is more urgent, for policies that have priorities."""
    arrival: float = 0.0
    """time.monotonic() at arrival, seconds."""
    salt: str = field(default="", validator=_of_type(str, "a string"))
    """Requests share prefix cache entries only if their salts are equal."""
    cache_key: str = field(default="", validator=_of_type(str, "a string"))
    """Requests with the same key likely share a prefix, so a server sends them to the same replica. Empty: no key."""
    prediction: Tokens = field(
        default=Tokens(), converter=_prediction, validator=_of_type(Tokens, "a tuple of token ids")
    )
    """What the output most likely is, given as a tuple or list, too: proposed where the output agrees, next to what the
    speculator proposes. Changes no token. Empty: no prediction."""


@frozen(kw_only=True)
class TokenLogprobs:
    """Log probabilities at one position, before any penalty or temperature; with a grammar, among the tokens that the
    grammar allows there."""

    token: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the most likely tokens, most likely first."""


@frozen(kw_only=True)
class NewSequence:
    """A sequence new to the runner. A request is a new sequence at each admission, also after a preemption."""

    sequence: int
    tokens: Tokens = field(converter=_tokens)
    """The prompt, followed by the output so far if the request was preempted."""
    prompt_len: int
    params: SamplingParams
    """With the seed set."""


@frozen
class PrefillChunk:
    """Known tokens of one sequence to compute: `count` tokens from position `start` on."""

    sequence: int
    start: int
    """Other sequences that share the blocks before have computed what this one has not: in an earlier step, or by an
    earlier chunk of the same step, whose keys and values each layer writes before its attention reads any."""
    count: int
    sample: bool
    """Whether to sample the next token after the chunk; False unless the chunk completes the prefill."""


@frozen
class DraftSlice:
    """Tokens of a decoding sequence to compute in one step: the token sampled last, and drafts that may follow it.

    The sequence samples after each of them. Its drafts are accepted up to the first that differs from the token sampled
    in its place.
    """

    sequence: int
    start: int
    """Position of the token sampled last."""
    tokens: tuple[int, ...]
    """The token sampled last, then one draft or more."""


@frozen(kw_only=True)
class Step:
    """One batch for the runner, decodes followed by prefill chunks and by draft slices, as the difference to the
    previous steps.

    The engine sends it to every worker as msgpack (core/executors/wire.py). A worker keeps the tokens and block table
    of each sequence between steps and applies the steps in order: `new`, `blocks` and `finished` say what changed.
    """

    id: int
    decodes: tuple[int, ...]
    """Sequences that decode: each computes the token sampled last and samples the next. The runner knows that token and
    its position, so that a step can be planned before the result of the previous step is known. The same tuple object
    as in the previous step if nothing changed."""
    chunks: tuple[PrefillChunk, ...]
    """Chunks of prompts, and of output to recompute after a preemption."""
    iterations: int = 1
    """Above 1 (a multi-step step, which has neither chunks nor drafts): repeat, feeding back each sampled token,
    without the scheduler."""
    drafts: tuple[DraftSlice, ...] = ()
    """Sequences that decode with drafts; they are not in `decodes`."""
    positions: tuple[tuple[int, int], ...] = ()
    """(sequence, position of its next token), for sequences that had drafts in an earlier step and may decode without
    in this one or a later one: a runner does not follow how many drafts were accepted. A draft slice says its own."""
    propose: int = 0
    """Maximum tokens that a speculator on the device proposes after the step, for each sequence that samples. 0: it
    proposes none, but computes the step's tokens all the same."""
    new: tuple[NewSequence, ...] = ()
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(block table, KV blocks to append to it), for all iterations. A table is numbered sequence * kinds + kind, where
    `kinds` counts CacheInfo.kinds: with one kind as its sequence. Each index of the table takes BlockKind.groups
    blocks. -n in front: they are those from index n on, since the n indices before are behind the window of a cached
    prefix, or since the blocks after them, which held rejected drafts, were freed."""
    finished: tuple[int, ...] = ()
    """Sequences to forget before anything else is done; their blocks may belong to other sequences in this step."""
    grammars: tuple[Grammar, ...] = ()
    """Grammars that the engine began to compile since the step before. A worker begins now too, and has them when their
    sequences come."""

    @property
    def decode_rows(self) -> int:
        """Tokens that an iteration computes without the chunks: one per decode, and those of the draft slices."""
        rows = len(self.decodes)
        return rows + sum(len(part.tokens) for part in self.drafts) if self.drafts else rows


@frozen(kw_only=True)
class StepResult:
    """The tokens and log probabilities that a step sampled."""

    step: int
    tokens: tuple[tuple[int, ...], ...]
    """One row per iteration: a token, or NO_TOKEN, for each sequence that samples, decodes first, then the chunks that
    sample."""
    logprobs: tuple[tuple[TokenLogprobs | None, ...], ...] = ()
    """Of the same shape, None for a sequence that did not ask; empty if no sequence asked."""
    verified: tuple[tuple[int, ...], ...] = ()
    """For each of Step.drafts, the drafts accepted and the token sampled after them, which may be NO_TOKEN."""
    verified_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """For each of Step.drafts one entry per token, none for a sequence that did not ask; empty if no sequence asked."""
    proposals: tuple[tuple[int, ...], ...] = ()
    """With Step.propose: for each sequence that samples, decodes first, then the chunks that sample, then the draft
    slices, the tokens that most likely follow the token sampled last; fewer where the sequence's blocks end."""
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()
    """(sequence, one entry per prompt position computed in this step), for sequences that asked; the entry of a
    position is about the prompt token after that position."""
    seconds: tuple[tuple[str, float], ...] = ()
    """(phase, seconds): prepare, launch, sample."""
    kernels_compiled: int = 0
    """Kernels that the step compiled, or loaded from the kernel cache, since the start had not; on rank 0."""
    graphs_captured: int = 0
    """CUDA graphs that the step captured since the start had not; on rank 0."""
    graph_size: int | None = None
    """What the CUDA graphs that ran the step were captured for: sequences, or tokens where the step has chunks.
    0: the step ran without graphs. None: there are no graphs."""
    gc_pauses: tuple[HistogramCounts, ...] = ()
    """Pauses of garbage collections so far, seconds, by generation, in the process of rank 0; () from an executor that
    runs in the engine's process."""


@frozen(kw_only=True)
class RequestTimes:
    """When a request arrived, was first scheduled, got its first token and finished: time.monotonic(), seconds.

    `finished` is the time of the first token while the request goes on.
    """

    arrival: float
    scheduled: float
    first_token: float
    finished: float


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The new tokens of one request after a step, or its end."""

    request: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Once, with the first token, if requested: one entry for each prompt token but the first."""
    finish_reason: FinishReason | None = None
    """None until the request finishes."""
    stop_token: int | None = None
    """The stop token that ended the request, if any: the last of `tokens`, and not part of the text."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    error: str | None = None
    """A sentence, if finish_reason is "error"."""
    refused: bool = False
    """With `error`: whether the request can never be served as given, so that the client is at fault."""
    parameter: str | None = None
    """With `refused`: the field of SamplingParams or Request at fault, if there is one."""
    times: RequestTimes | None = None
    """With the first and the last output only; `finished` is the time of the output."""
    num_tokens: int = 0
    """With the last output only: tokens generated in all."""
    preemptions: int = 0
    """With the last output only: how often the request was preempted."""
    prediction_tokens: tuple[int, int] | None = None
    """Of a request with a prediction: how many tokens of it were verified so far and are in the output, and how many
    were verified and are not. None without a prediction; also with an output by which neither has changed."""


@frozen(kw_only=True)
class BlockKind:
    """Layers of one kind of KV cache, whose blocks a sequence gets and gives up together.

    The layers are divided into cache groups of at most as many layers as a block has room for. A block table of the
    kind holds, for each index, one block per group.
    """

    name: str
    """As shown to users: "full" or "window 1024"."""
    window: int | None = None
    """The number of tokens that a token attends to, itself included; None: the whole context."""
    groups: int = 1
    """Cache groups, and so blocks per index of the table."""
    layers: int = 0


FULL = BlockKind(name="full")


@frozen(kw_only=True)
class CacheInfo:
    """The KV cache that an executor has allocated, and the memory used, in bytes."""

    num_blocks: int
    block_size: int
    """Tokens per block."""
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    budget_bytes: int
    """Maximum for weights, activations, penalties, kernels and KV cache together."""
    device: str
    """The device, as shown to users."""
    dtype: str
    kv_dtype: str = ""
    """Data type of keys and values; empty: as dtype."""
    penalty_bytes: int = 0
    """Maximum of the token counts for penalties; used only as long as requests have penalties."""
    kernel_bytes: int = 0
    """The most that kernels compiled while serving take, on a CPU."""
    kinds: tuple[BlockKind, ...] = (FULL,)
    """The kinds of layers that share the blocks."""
    states: int = 0
    """Layers that keep a state per sequence instead of blocks. If there are any, no prefix can be reused."""
    state_bytes: int = 0
    """Of the states of all running sequences."""
    blocks_per_context: int = 0
    """Maximum blocks of one context of full length."""
    cost: ModelCost | None = None
    """What steps cost on rank 0, condensed; None: the executor does not say."""
    phases: tuple[tuple[str, float], ...] = ()
    """(start-up phase, seconds): from an executor the phases of its `start`, from an engine all phases."""

    @property
    def reusable_indices(self) -> int:
        """How many indices of block tables the prefix cache can hold; 0: no prefix can be reused."""
        groups = sum(kind.groups for kind in self.kinds)
        return self.num_blocks // groups if groups and not self.states else 0


@frozen
class HistogramCounts:
    """The contents of a histogram, whose bucket bounds both sides know."""

    counts: tuple[int, ...] = ()
    """One per bucket, not cumulative; the last one counts values above all bounds. Empty: nothing has been counted."""
    sum: float = 0.0
    """Of all values."""


@frozen(kw_only=True)
class CacheStats:
    """What `cache.metrics` measures since the start of one engine.

    The histograms are of the sampled blocks, in seconds, with the bounds RESIDENCY_BOUNDS. In a model of several kinds
    of layers, the blocks at one index of a block table of one kind count as one: they are allocated, reused and evicted
    together.
    """

    sample: float
    """Share of blocks that are sampled."""
    lifetime: HistogramCounts = HistogramCounts()
    """From the allocation of a block to its eviction from the prefix cache."""
    idle_before_evict: HistogramCounts = HistogramCounts()
    """From the last reuse of a block, or from its allocation, to its eviction."""
    reuse_gap: HistogramCounts = HistogramCounts()
    """Between the last reuses of a block; counted at its eviction."""
    hit_age: HistogramCounts = HistogramCounts()
    """From the allocation of a block to its reuse by a sequence that begins with it."""
    tenants: tuple[tuple[str, int, int], ...] = ()
    """(label, prompt tokens looked up, prompt tokens found) of each tenant."""
    unfilled_slots: int = 0
    """Slots for tokens in the blocks of running sequences that no known token fills."""
    unreachable_slots: int = 0
    """Slots in cached blocks that no sequence can begin with, since a block before them was evicted."""
    total_slots: int = 0
    """Slots of all blocks; a block has `block_size`."""


@frozen(kw_only=True)
class SpeculationStats:
    """What became of the drafts of a speculator, since the start of one engine."""

    verified: tuple[int, ...]
    """Drafts that steps have verified, by position: first those right after a known token."""
    accepted: tuple[int, ...]
    """Those of them that were accepted, which all before them were as well. Each saved one token of a decode."""
    faults: int = 0
    """Calls in which the speculator failed or gave an invalid answer; its requests then had no drafts."""


@frozen(kw_only=True)
class EngineStats:
    """Counters since the start of one engine, and current gauges."""

    running: int = 0
    waiting: int = 0
    compiling: int = 0
    """Requests that wait until their grammars are compiled; not among `waiting`."""
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    blocks_by_kind: tuple[tuple[str, int, int], ...] = ()
    """(BlockKind.name, blocks used, blocks cached) of each kind, if there are several."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache."""
    preemptions: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed."""
    generation_tokens: int = 0
    steps: int = 0
    policy_faults: int = 0
    """Decisions made first come, first served because the scheduling policy failed or gave an invalid answer."""
    seconds: tuple[tuple[str, float], ...] = ()
    """(phase, seconds spent in it): schedule, submit, wait, commit and the runner's own phases."""
    kernels_compiled: int = 0
    """Kernels compiled, or loaded from the kernel cache, by steps: each delays all requests of its step."""
    graphs_captured: int = 0
    """CUDA graphs captured by steps: each delays all requests of its step."""
    cache: CacheStats | None = None
    """What `cache.metrics` measures; None: it is off."""
    speculation: SpeculationStats | None = None
    """None: there is no speculator."""
    kv_events: tuple[int, int] | None = None
    """Batches of events of the KV cache, and how many of them were dropped; None: none are published."""
    graph_replays: tuple[tuple[str, int, int, int], ...] = ()
    """(kind of step: decode, verify or prefill, size, steps that ran in graphs of this size, sequences or tokens of
    padding in them), ascending; the last two are counters."""
    graph_misses: int | None = None
    """Steps that ran without CUDA graphs although there are some; None: there are none."""
    work: tuple[StepWork, ...] = ()
    """What steps computed and moved on rank 0, by kind of step; () where that is off or unknown."""
    peaks: Peaks | None = None
    """Of the device of rank 0; None: unknown, or `work` is off."""
    gc_pauses: tuple[tuple[str, tuple[HistogramCounts, ...]], ...] = ()
    """(process, its garbage collections): engine and, if it has a process of its own, rank 0 as worker."""
    step_tokens: HistogramCounts = HistogramCounts()
    """Tokens that each step computed; each iteration of a multi-step step counts. Bounds: STEP_TOKENS_BOUNDS."""
    request_preemptions: HistogramCounts = HistogramCounts()
    """Preemptions of each request that has ended, also of those aborted. Bounds: PREEMPTIONS_BOUNDS."""

"""A fake runner that reads its context from KV blocks, and the outputs that a request has when it runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from engine.core.types import Request, SamplingParams, Step, StepResult, TokenLogprobs

EOS = 0
VOCABULARY = 12


def next_token(context: Sequence[int], seed: int) -> int:
    """The token that the fake model samples after a context."""
    return crc32(repr((list(context), seed)).encode()) % VOCABULARY


def expected_output(request: Request, longest: int) -> tuple[list[int], str]:
    """Tokens and finish reason of a request run alone."""
    params = request.params
    assert params.seed is not None
    tokens: list[int] = []
    max_tokens = params.max_tokens or longest - len(request.prompt)
    stops = {*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, EOS}
    while True:
        tokens.append(next_token([*request.prompt, *tokens], params.seed))
        if tokens[-1] in stops and len(tokens) >= params.min_tokens:
            return tokens, "stop"
        if len(tokens) == max_tokens:
            return tokens, "length"


def sequences(step: Step) -> list[int]:
    """All sequences in the step."""
    return [*step.decodes, *(chunk.sequence for chunk in step.chunks)]


class FakeRunner:
    """Runs steps by nothing but the contract of Step."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.pool: dict[tuple[int, int], tuple[int, int, int]] = {}  # (block, offset): (seed, position, token)
        self.known: dict[int, list[int]] = {}
        self.params: dict[int, SamplingParams] = {}
        self.prompt_len: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.numbers: set[int] = set()
        self.cached = 0  # tokens of prefills that other sequences have computed
        self.chunk_tokens = 0  # tokens computed by prefill chunks
        self.decodes: tuple[int, ...] = ()  # of the last step

    def run(self, step: Step) -> StepResult:
        for sequence in step.finished:
            for state in (self.known, self.params, self.prompt_len, self.tables):
                del state[sequence]
            self.computed.pop(sequence, None)
        for new in step.new:
            assert new.sequence not in self.numbers, "a sequence number is used again"
            self.numbers.add(new.sequence)
            self.known[new.sequence] = list(new.tokens)
            self.params[new.sequence] = new.params
            self.prompt_len[new.sequence] = new.prompt_len
            self.tables[new.sequence] = []
        for sequence, blocks in step.blocks:
            assert blocks
            self.tables[sequence] += blocks
        assert len(set(sequences(step))) == len(sequences(step))
        assert step.iterations == 1 or not step.chunks
        assert (step.decodes is self.decodes) == (step.decodes == self.decodes), "same sequences, other tuple"
        self.decodes = step.decodes

        rows = []
        scores = []
        for _ in range(step.iterations):
            rows.append([self.decode(sequence) for sequence in step.decodes])
        for chunk in step.chunks:
            sequence, known = chunk.sequence, self.known[chunk.sequence]
            assert chunk.sample == (chunk.start + chunk.count == len(known))
            self.compute(sequence, chunk.start, chunk.start + chunk.count)
            if chunk.sample:
                rows[0].append(self.sample(sequence))
            if self.params[sequence].prompt_logprobs is not None and chunk.start < self.prompt_len[sequence] - 1:
                end = min(chunk.start + chunk.count, self.prompt_len[sequence] - 1)
                targets = known[chunk.start + 1 : end + 1]
                scores.append((sequence, tuple(TokenLogprobs(token=token, logprob=0.0, rank=1) for token in targets)))
        return StepResult(
            step=step.id,
            tokens=tuple(tuple(row) for row in rows),
            logprobs=tuple(tuple(TokenLogprobs(token=token, logprob=0.0, rank=1) for token in row) for row in rows),
            prompt_logprobs=tuple(scores),
        )

    def decode(self, sequence: int) -> int:
        """Compute the token sampled last, and sample the next."""
        position = self.computed[sequence]
        assert position == len(self.known[sequence]) - 1 >= self.prompt_len[sequence]
        self.compute(sequence, position, position + 1)
        return self.sample(sequence)

    def sample(self, sequence: int) -> int:
        """Sample the token that follows the computed ones."""
        seed = self.params[sequence].seed
        assert seed is not None
        token = next_token(self.read(sequence, self.computed[sequence]), seed)
        self.known[sequence].append(token)
        return token

    def compute(self, sequence: int, start: int, end: int) -> None:
        """Write positions to the pool, in order. Other sequences must have computed those skipped, and none of these.

        The chunks of a step are computed one after the other, so that one may read what those before it have written.
        """
        done = self.computed.get(sequence, 0)
        assert done <= start < end, "a position is computed twice, or a chunk is empty"
        self.cached += start - done
        self.read(sequence, start)
        for position in range(start, end):
            block = self.tables[sequence][position // self.block_size]
            for other, table in self.tables.items():
                assert other == sequence or block not in table or self.computed.get(other, 0) <= position, (
                    "a position that another sequence has read is written again"
                )
            seed = self.params[sequence].seed
            assert seed is not None
            self.pool[block, position % self.block_size] = (seed, position, self.known[sequence][position])
        self.computed[sequence] = end
        if sequence not in self.decodes:
            self.chunk_tokens += end - start

    def clear(self, block: int) -> None:
        """Forget the contents of a block."""
        for offset in range(self.block_size):
            self.pool.pop((block, offset), None)

    def read(self, sequence: int, end: int) -> list[int]:
        """The context in the pool. Seeds stand for salts: the context may hold no block of another seed."""
        table, seed = self.tables[sequence], self.params[sequence].seed
        cells = [self.pool.get((table[at // self.block_size], at % self.block_size)) for at in range(end)]
        wanted = [(seed, at, token) for at, token in enumerate(self.known[sequence][:end])]
        assert cells == wanted, "a block is read that holds another context, or that no step has computed yet"
        return [token for _, _, token in wanted]

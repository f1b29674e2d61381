"""A fake runner that reads its context from KV blocks, and the outputs that a request has when it runs alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from zlib import crc32

from engine.core.types import (
    FULL,
    BlockKind,
    DraftSlice,
    Request,
    SamplingParams,
    Step,
    StepResult,
    TokenLogprobs,
)

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
    return [*step.decodes, *(chunk.sequence for chunk in step.chunks), *(part.sequence for part in step.drafts)]


def num_tokens(step: Step) -> int:
    """Tokens that one iteration of the step computes."""
    return len(step.decodes) + sum(chunk.count for chunk in step.chunks) + sum(len(part.tokens) for part in step.drafts)


def _logprobs(rows: Sequence[Sequence[int]]) -> tuple[tuple[TokenLogprobs, ...], ...]:
    return tuple(tuple(TokenLogprobs(token=token, logprob=0.0, rank=1) for token in row) for row in rows)


class FakeRunner:
    """Runs steps by nothing but the contract of Step. In each iteration it writes all tokens before it reads any, as a
    layer does, and then checks the context of every running sequence."""

    def __init__(self, block_size: int, kinds: Sequence[BlockKind] = (FULL,), *, has_state: bool = False) -> None:
        """has_state: whether layers keep a state per sequence, in a row that the sequence has while it runs."""
        self.block_size = block_size
        self.kinds = kinds
        self.has_state = has_state
        # (block, offset): (kind, group, seed, position, token)
        self.pool: dict[tuple[int, int], tuple[int, int, int, int, int]] = {}
        self.states: dict[int, tuple[int, list[int]]] = {}  # by row: seed, tokens
        self.rows: dict[int, int] = {}
        self.known: dict[int, list[int]] = {}
        self.params: dict[int, SamplingParams] = {}
        self.prompt_len: dict[int, int] = {}
        self.tables: dict[int, list[list[int]]] = {}  # per kind, the blocks of all indices; -1: skipped
        self.computed: dict[int, int] = {}
        self.numbers: set[int] = set()
        self.cached = 0  # tokens of prefills that other sequences have computed
        self.chunk_tokens = 0  # tokens computed by prefill chunks
        self.decodes: tuple[int, ...] = ()  # of the last step
        self.random = Random(0)  # how good proposals are
        self.adrift: set[int] = set()  # sequences whose drafts were verified, until the step that says where they are

    def run(self, step: Step) -> StepResult:
        for sequence in step.finished:
            for state in (self.known, self.params, self.prompt_len, self.tables, self.rows):
                del state[sequence]
            self.computed.pop(sequence, None)
            self.adrift.discard(sequence)
        for new in step.new:
            assert new.sequence not in self.numbers, "a sequence number is used again"
            self.numbers.add(new.sequence)
            self.known[new.sequence] = list(new.tokens)
            self.params[new.sequence] = new.params
            self.prompt_len[new.sequence] = new.prompt_len
            self.tables[new.sequence] = [[] for _ in self.kinds]
            self.rows[new.sequence] = next(row for row in range(10**6) if row not in self.rows.values())
        for number, update in step.blocks:
            assert update
            blocks = update
            sequence, kind = divmod(number, len(self.kinds))
            table, groups = self.tables[sequence][kind], self.kinds[kind].groups
            if blocks[0] < 0:
                first, blocks = -blocks[0] * groups, blocks[1:]
                assert not table or self.holds_no_more(sequence, first // groups), "blocks of known tokens are freed"
                del table[first:]
                table += [-1] * (first - len(table))
            table += blocks
            assert len(table) % groups == 0
        for sequence, position in step.positions:
            assert sequence in self.adrift
            assert position == self.computed[sequence]
            self.adrift.remove(sequence)
        assert len(set(sequences(step))) == len(sequences(step))
        assert step.iterations == 1 or not (step.chunks or step.drafts)
        assert (step.decodes is self.decodes) == (step.decodes == self.decodes), "same sequences, other tuple"
        self.decodes = step.decodes

        rows = []
        scores = []
        for _ in range(step.iterations):
            for sequence in step.decodes:
                position = self.computed[sequence]
                assert sequence not in self.adrift, "a sequence decodes, but it is not known where"
                assert position == len(self.known[sequence]) - 1 >= self.prompt_len[sequence]
                self.write(sequence, position, position + 1)
            for chunk in step.chunks:
                assert chunk.sample == (chunk.start + chunk.count == len(self.known[chunk.sequence]))
                self.cached += chunk.start - self.computed.get(chunk.sequence, 0)
                self.chunk_tokens += chunk.count
                self.write(chunk.sequence, chunk.start, chunk.start + chunk.count)
            for part in step.drafts:
                sequence, (last, *drafts) = part.sequence, part.tokens
                assert part.start == self.computed[sequence] == len(self.known[sequence]) - 1
                assert last == self.known[sequence][-1]
                assert drafts
                self.known[sequence] += drafts
                self.write(sequence, part.start, part.start + len(part.tokens))
            for chunk in step.chunks:
                self.read(chunk.sequence, chunk.start)
            for part in step.drafts:
                self.read(part.sequence, part.start)
            for sequence in self.computed:
                self.read(sequence, self.computed[sequence] - (sequence in step.decodes))
            rows.append([self.sample(sequence) for sequence in step.decodes])
            rows[-1] += [self.sample(chunk.sequence) for chunk in step.chunks if chunk.sample]
        verified = [self.verify(part) for part in step.drafts]
        for chunk in step.chunks:
            sequence = chunk.sequence
            if self.params[sequence].prompt_logprobs is not None and chunk.start < self.prompt_len[sequence] - 1:
                end = min(chunk.start + chunk.count, self.prompt_len[sequence] - 1)
                targets = self.known[sequence][chunk.start + 1 : end + 1]
                scores.append((sequence, tuple(TokenLogprobs(token=token, logprob=0.0, rank=1) for token in targets)))
        return StepResult(
            step=step.id,
            tokens=tuple(tuple(row) for row in rows),
            logprobs=_logprobs(rows),
            verified=tuple(verified),
            verified_logprobs=_logprobs(verified),
            prompt_logprobs=tuple(scores),
            proposals=self.propose(step),
        )

    def propose(self, step: Step) -> tuple[tuple[int, ...], ...]:
        """What a speculator on the device proposes: a right beginning, then wrong tokens; fewer where blocks end."""
        if not step.propose:
            return ()
        found = []
        sampling = [*step.decodes, *(chunk.sequence for chunk in step.chunks if chunk.sample)]
        for sequence in (*sampling, *(part.sequence for part in step.drafts)):
            tokens, newest = list(self.known[sequence]), len(self.known[sequence]) - 1
            room = len(self.tables[sequence][0]) // self.kinds[0].groups * self.block_size - newest
            count = max(0, min(step.propose, room))
            for position in range(newest, newest + count):
                self.check_own(sequence, position)
            right = self.random.randint(0, count)
            for place in range(count):
                token = next_token(tokens, self.seed(sequence))
                tokens.append(token if place < right else (token + 1) % VOCABULARY)
            found.append(tuple(tokens[newest + 1 :]))
        return tuple(found)

    def check_own(self, sequence: int, position: int) -> None:
        """Check that no other sequence holds the block of a position that a speculator writes to."""
        _, _, table = next(self.group_tables(sequence))  # a speculator uses the table of the first group
        block = table[position // self.block_size]
        for other, tables in self.tables.items():
            assert other == sequence or block not in tables[0], "a speculator writes to a block of another sequence"

    def verify(self, part: DraftSlice) -> tuple[int, ...]:
        """Sample after each token of a slice whose drafts are written, up to the first that is not the next draft."""
        sequence, drafts = part.sequence, part.tokens[1:]
        known = self.known[sequence] = self.known[sequence][: part.start + 1]
        for draft in (*drafts, None):
            self.computed[sequence] = len(known)
            if self.sample(sequence) != draft:
                break
        self.adrift.add(sequence)
        return tuple(known[part.start + 1 :])

    def holds_no_more(self, sequence: int, blocks: int) -> bool:
        """Whether the known tokens of a sequence fill at most this many blocks."""
        return len(self.known[sequence]) <= blocks * self.block_size

    def sample(self, sequence: int) -> int:
        """Sample the token that follows the computed ones."""
        token = next_token(self.known[sequence][: self.computed[sequence]], self.seed(sequence))
        self.known[sequence].append(token)
        return token

    def seed(self, sequence: int) -> int:
        seed = self.params[sequence].seed
        assert seed is not None
        return seed

    def write(self, sequence: int, start: int, end: int) -> None:
        """Write positions to the pool. Other sequences must have computed those skipped, and none of these."""
        done = self.computed.get(sequence, 0)
        assert done <= start < end, "a position is computed twice, or a chunk is empty"
        seed, tokens = self.seed(sequence), self.known[sequence]
        for kind, group, table in self.group_tables(sequence):
            groups = self.kinds[kind].groups
            for position in range(start, end):
                index = position // self.block_size
                for other, computed in self.computed.items():
                    shares = self.tables[other][kind][index * groups + group :][:1] == [table[index]]
                    assert other == sequence or not shares or not self.first(kind, computed) <= position < computed, (
                        "a position that another sequence has read is written again"
                    )
                self.pool[table[index], position % self.block_size] = (kind, group, seed, position, tokens[position])
        if self.has_state:
            row = self.rows[sequence]
            if start:
                assert self.states[row] == (seed, tokens[:start]), "a state is that of another context"
            self.states[row] = (seed, tokens[:end])
        self.computed[sequence] = end

    def clear(self, block: int) -> None:
        """Forget the contents of a block."""
        for offset in range(self.block_size):
            self.pool.pop((block, offset), None)

    def read(self, sequence: int, query: int) -> None:
        """Check that the pool holds what the token at `query` and the later computed ones attend to.

        Seeds stand for salts: the context may hold no block of another seed.
        """
        seed, tokens, end = self.seed(sequence), self.known[sequence], self.computed[sequence]
        for kind, group, table in self.group_tables(sequence):
            first = self.first(kind, query)
            cells = [self.pool.get((table[at // self.block_size], at % self.block_size)) for at in range(first, end)]
            wanted = [(kind, group, seed, at, tokens[at]) for at in range(first, end)]
            assert cells == wanted, "a block is read that holds another context, or that no step has computed yet"

    def first(self, kind: int, query: int) -> int:
        """The first position that the token at `query` attends to."""
        window = self.kinds[kind].window
        return 0 if window is None else max(0, query + 1 - window)

    def group_tables(self, sequence: int) -> Iterator[tuple[int, int, list[int]]]:
        """Kind, group, and the group's block of every index."""
        for kind, table in enumerate(self.tables[sequence]):
            groups = self.kinds[kind].groups
            for group in range(groups):
                yield kind, group, table[group::groups]

"""A model architecture whose outputs are prescribed: a plugin of the engine, for tests of API clients.

A conversation that contains the name of a script (`script-NAME`) is answered with the script's turns, one for each
answer since the name first appeared; any other with a fixed sentence. Scripts are files NAME.json of the directory
`scripts` of config.json: a list of turns, each the text that the model generates, reasoning and calls as the chat
template's family writes them. The text is the most likely one, so that a grammar changes it where it does not match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.hooks import Register, hookimpl

if TYPE_CHECKING:
    import torch

ARCHITECTURE = "ScriptedForCausalLM"
OTHERWISE = "There is no script for this conversation."
NAME = re.compile(r"script-([0-9a-z]+)")
HEADER = "<|im_start|>assistant\n"
NO_REASONING = "<think>\n\n</think>\n\n"
"""What the chat template puts at the end of the prompt where the model is to answer without reasoning."""
SCRIPTED, END = 100.0, 50.0
"""Logits of the next token of the script, and of the end of the output; others have 0."""


@hookimpl
def register_models(register: Register) -> None:
    register("scripted", load, api="2", summary="plays scripts", preference=99)


def load() -> type:
    import torch

    from engine.core.models import ForwardPass, Model, ModelSpec
    from engine.core.text import Tokenizer

    class Scripted(Model):
        api = "2"

        @classmethod
        def refuses(cls, config: Mapping[str, Any]) -> str | None:
            return None if config["architectures"] == [ARCHITECTURE] else "it plays scripts only"

        @classmethod
        def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
            return ModelSpec(
                num_layers=1,
                num_heads=1,
                num_kv_heads=1,
                head_dim=8,
                hidden_size=8,
                vocab_size=config["vocab_size"],
                max_len=config["max_position_embeddings"],
                sliding_windows=(None,),
                scale=1.0,
            )

        def __init__(self, config: Mapping[str, Any], layers: Any, options: Any = None) -> None:
            self.vocab_size = config["vocab_size"]
            self.embedding = layers.embedding("embedding", self.vocab_size, 8)
            self.player = Player(Path(config["scripts"]), Tokenizer.open(config["tokenizer"]), config["eos_token_id"])
            self.cached = torch.zeros(0, dtype=torch.int64)
            """The token at each slot of the KV cache, as a real model has its keys there."""

        def forward(self, run: ForwardPass) -> torch.Tensor:
            batch = run.batch
            slots = (run.pool.num_blocks + 1) * run.pool.block_size
            if len(self.cached) < slots:
                self.cached = torch.zeros(slots, dtype=torch.int64)
            self.cached[batch.slots] = batch.tokens
            hidden = torch.zeros(len(batch.tokens), 8)
            ends = (batch.query_starts[1:] - 1).tolist()
            for index, row in enumerate(ends):
                places = torch.arange(int(batch.context_lens[index]))
                size = run.pool.block_size
                blocks = batch.block_tables[index].long()[places // size]
                context = self.cached[blocks * size + places % size]
                hidden[row, 0] = self.player.next_token(tuple(context.tolist()))
            return hidden

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            made = torch.zeros(len(hidden), self.vocab_size)
            made[:, self.player.end] = END
            made.scatter_(1, hidden[:, :1].long(), SCRIPTED)
            return made

    return Scripted


class Player:
    """Finds the next token of a conversation."""

    def __init__(self, scripts: Path, tokenizer: Any, end: int) -> None:
        self.end = end
        self._scripts = scripts
        self._tokenizer = tokenizer
        self._header = tuple(tokenizer.encode(HEADER, add_special_tokens=False))
        self._no_reasoning = tuple(tokenizer.encode(NO_REASONING, add_special_tokens=False))
        self._answers: dict[tuple[int, ...], str] = {}

    def next_token(self, context: tuple[int, ...]) -> int:
        """The token after `context`."""
        begin = self._begin(context)
        prompt, answer = context[:begin], context[begin:]
        if prompt not in self._answers:
            self._answers[prompt] = self._answer(self._tokenizer.decode(prompt, skip_special_tokens=False))
        said, script = self._tokenizer.decode(answer, skip_special_tokens=False), self._answers[prompt]
        rest = script[len(said) :] if script.startswith(said) else ""
        return self._tokenizer.encode(rest, add_special_tokens=False)[0] if rest else self.end

    def _begin(self, context: tuple[int, ...]) -> int:
        """Where the answer begins."""
        first, length = self._header[0], len(self._header)
        for at in range(len(context) - length, -1, -1):
            if context[at] == first and context[at : at + length] == self._header:
                begin = at + length
                skipped = begin + len(self._no_reasoning)
                return skipped if context[begin:skipped] == self._no_reasoning else begin
        return len(context)

    def _answer(self, prompt: str) -> str:
        """What the model says to this prompt."""
        found = NAME.search(prompt)
        file = None if found is None else self._scripts / f"{found[1]}.json"
        if found is None or file is None or not file.exists():
            return OTHERWISE
        turns = json.loads(file.read_text())
        number = prompt.count(HEADER, found.end()) - 1
        return str(turns[number]) if number < len(turns) else OTHERWISE

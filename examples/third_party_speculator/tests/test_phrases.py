from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_phrases import Options, Phrases

from engine.core.errors import ConfigError
from engine.core.speculators import SpeculatedSequence, SpeculatorSpec
from engine.testing.speculators import SpeculatorConformance

SPEC = SpeculatorSpec(vocab_size=100, max_len=64, max_drafts=8)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file of two phrases."""
    path = tmp_path / "phrases.json"
    path.write_text(json.dumps([[1, 2, 3, 4, 5, 6, 7, 8], [11, 3, 4, 5, 6, 60]]))
    return str(path)


class TestPhrases(SpeculatorConformance):
    speculator = Phrases

    @pytest.fixture(autouse=True)
    def _options(self, file: str) -> None:
        type(self).options = Options(file=file)


def propose(file: str, tokens: list[int], limit: int = 8) -> list[int]:
    sequence = SpeculatedSequence(request_id="r", tokens=tokens, prompt_length=1)
    return list(Phrases(SPEC, Options(file=file)).propose(sequence, limit))


def test_the_rest_of_a_phrase_is_proposed(file: str) -> None:
    assert propose(file, [9, 1, 2, 3, 4]) == [5, 6, 7, 8]
    assert propose(file, [9, 1, 2, 3, 4], 2) == [5, 6]
    assert propose(file, [3, 4, 5, 6]) == [7, 8], "the first phrase's"
    assert propose(file, [11, 3, 4, 5]) == [6, 60]
    assert propose(file, [5, 6, 7, 8]) == propose(file, [1]) == propose(file, [9, 9, 9, 9]) == []


def test_phrases_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    (tmp_path / "large.json").write_text("[[1, 100]]")
    with pytest.raises(ConfigError, match="has token 100, but the vocabulary has 100"):
        Phrases(SPEC, Options(file=str(tmp_path / "large.json")))

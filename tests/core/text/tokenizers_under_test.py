"""Small tokenizers of every kind that the engine distinguishes."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.core.text.tokenizer import Tokenizer

CORPUS = [
    "def main(args): return the other thing",
    "Über straße 你好世界 🦀🦀 👩\u200d👧 end",
    "  indent\n\tx = 1\n\n",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REPLACEMENT = "\ufffd"


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens(["<think>", "你好 é"])
    return backend


def unusual() -> Backend:
    """A byte-level vocabulary with a decoder that the tokenizer does not recognize."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


def byte_fallback() -> Backend:
    """As in Llama 2: a space is ▁, and characters outside the vocabulary become tokens for their bytes."""
    letters = ["▁", *"abcdefghimnorstux=()12", "é", "世", "th", "the", "▁t", "▁the", "in", "er", REPLACEMENT]
    names = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("t", "h"), ("th", "e"), ("▁", "t"), ("▁", "the"), ("i", "n"), ("e", "r")]
    model = models.BPE({name: at for at, name in enumerate(names)}, merges, byte_fallback=True, unk_token="<unk>")
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return backend


def byte_fallback_with_space() -> Backend:
    """As in Gemma: nothing is put before a text, and no space is dropped at its beginning."""
    backend = byte_fallback()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def unusual_byte_fallback() -> Backend:
    """A byte-fallback vocabulary with a decoder that the tokenizer does not recognize."""
    backend = byte_fallback()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([*parts, decoders.Fuse()])
    return backend


def metaspace() -> Backend:
    letters = ["▁", *"abcdefghimnorstux=()12\n\t", "é", "你", "▁the", "▁t", "the", "ing", "🦀", "<unk>"]
    backend = Backend(models.Unigram([(name, -1.0 - at / 9) for at, name in enumerate(letters)], len(letters) - 1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return backend


def word_piece() -> Backend:
    words = [
        "[UNK]",
        *"abcdefghinorst.,'",
        *("##" + letter for letter in "abcdefghinorst"),
        "the",
        "##ing",
        "don",
        "世",
    ]
    backend = Backend(models.WordPiece({name: at for at, name in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece("##")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return backend


def wrap(backend: Backend, **settings: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **settings)


_KINDS = (
    byte_level,
    byte_fallback,
    byte_fallback_with_space,
    metaspace,
    word_piece,
    unusual,
    unusual_byte_fallback,
)
BUILDERS = {each.__name__: each for each in _KINDS}
TOKENIZERS = {name: Tokenizer(wrap(build())) for name, build in BUILDERS.items()}
LOSSLESS = ("byte_level", "byte_fallback", "byte_fallback_with_space", "unusual", "unusual_byte_fallback")
_SAME_BYTES = {"unusual": "byte_level", "unusual_byte_fallback": "byte_fallback"}
BYTES_OF = {name: TOKENIZERS[_SAME_BYTES.get(name, name)].token_bytes for name in LOSSLESS}

every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)

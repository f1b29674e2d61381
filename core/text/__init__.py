"""Converts text to tokens and tokens to text, stop strings included."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.text.detokenizer import Detokenizer as Detokenizer
    from engine.core.text.token_cache import TokenCache as TokenCache
    from engine.core.text.tokenizer import Tokenizer as Tokenizer

__getattr__, __dir__, __all__ = exports(
    __name__, detokenizer=("Detokenizer",), token_cache=("TokenCache",), tokenizer=("Tokenizer",)
)

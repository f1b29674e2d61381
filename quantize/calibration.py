"""Calibration text: reads files and cuts them into samples of tokens."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch
from attrs import frozen

from engine.core.errors import ConfigError
from engine.core.text import Tokenizer
from engine.quantize.settings import STATIC, Settings


@frozen(kw_only=True)
class Calibration:
    """The text from which magnitudes of activations are measured."""

    files: tuple[Path, ...]
    samples: int = 128
    length: int = 2048
    """Tokens per sample."""
    seed: int = 0
    """Seed of the choice of samples."""

    def read(self) -> str:
        """The text of all files. Raises ConfigError if a file cannot be read."""
        return "\n".join(read_text(file, "--calibration") for file in self.files)

    def draw(self, tokenizer: Tokenizer, max_len: int) -> torch.Tensor:
        """[samples, length] tokens: parts of the text that do not overlap, in a random order by the seed.

        Raises ConfigError if the text is too short, or samples are longer than the model's context.
        """
        if self.samples < 1 or self.length < 1:
            raise ConfigError(f"--samples {self.samples} and --sample-length {self.length} must both be 1 or more")
        if self.length > max_len:
            raise ConfigError(
                f"--sample-length {self.length} is longer than the model's context; use at most {max_len}"
            )
        tokens = tokenizer.encode(self.read(), add_special_tokens=False)
        pieces = len(tokens) // self.length
        if pieces < self.samples:
            fits = f"--samples {pieces}" if pieces else f"--sample-length {max(1, len(tokens) // self.samples)}"
            raise ConfigError(
                f"the calibration text has {len(tokens)} tokens, and {self.samples} samples of {self.length} need"
                f" {self.samples * self.length}; give more text, or use {fits}"
            )
        chosen = torch.randperm(pieces, generator=torch.Generator().manual_seed(self.seed))[: self.samples]
        return torch.tensor(tokens[: pieces * self.length]).view(pieces, self.length)[chosen]

    def fingerprint(self) -> str:
        """Identifies these samples."""
        text = repr((self.samples, self.length, self.seed, self.read()))
        return blake2b(text.encode(), digest_size=8).hexdigest()


def read_text(file: Path, flag: str) -> str:
    """A file's text. Raises ConfigError, naming the option, if it cannot be read."""
    try:
        return file.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{flag} {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {file} is not UTF-8 text: {error}") from error


def no_calibration(settings: Settings) -> ConfigError:
    """The error for settings that need calibration text where none is given."""
    what, instead = settings.method, "a method without: fp8, int8 or rtn, with dynamic activations"
    if settings.activations == STATIC:
        what = f"{settings.method} with static activations"
    elif not settings.is_calibrated:
        what, instead = f"--kv-cache {settings.kv_cache}", "leave out --kv-cache"
    return ConfigError(
        f"{what} needs text to run through the model; give --calibration FILE with a few hundred thousand words of"
        f" what the model will be used for (or {instead})"
    )

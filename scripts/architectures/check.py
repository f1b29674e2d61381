"""Checks one architecture: who serves it, and how far its logits are from those of transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from engine.core.plugin_host import load_plugins
from engine.core.weights import Checkpoint
from engine.plugins.models.transformers import Transformers
from engine.testing.model_bench import ModelBench

FALLBACK = "transformers"
LENGTHS = (60, 37)
"""Tokens of the two prompts."""
CHUNKS: Sequence[Sequence[tuple[int, int, int]]] = (
    [(0, 0, 20), (1, 0, 30)],
    [(1, 30, 1), (0, 20, 39)],
    [(0, 59, 1), (1, 31, 1)],
    [(1, 32, 5)],
)
"""(sequence, first token, number of tokens) of each batch: chunked prompts and decodes side by side."""
NEW_TOKENS = 24
MAX_PARAMETERS = 5_000_000


@frozen(kw_only=True)
class Verdict:
    """Who serves an architecture."""

    architecture: str
    model_type: str
    native: str = ""
    """Name of the native plugin; empty: none."""
    difference: float | None = None
    """Relative norm of the difference of the fallback's logits from those of transformers."""
    refusal: str = ""
    """Why the fallback does not serve the architecture."""
    notes: tuple[str, ...] = ()


def check(model_type: str, architecture: str) -> Verdict:
    """Make a tiny random checkpoint and compute its logits by the fallback and by transformers."""
    import transformers
    from tiny import tiny_config

    library: Any = transformers
    made = Verdict(architecture=architecture, model_type=model_type)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        try:
            config = tiny_config(model_type)
            _refuse_large(config)
            torch.manual_seed(0)
            model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
            _randomize(model)
            model.save_pretrained(directory)
        except Exception as error:  # of an architecture that a small config does not fit
            return _evolve(made, _without_checkpoint(model_type, architecture, error))
        stored = Checkpoint.open(directory).config
        refusal = Transformers.refuses(stored)
        if refusal is not None:
            return _evolve(made, {"native": _native(stored), "refusal": refusal.removeprefix(f"{architecture} ")})
        prompts = [
            torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()
            for length in LENGTHS
        ]
        try:
            reference = library.AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            with torch.inference_mode():
                wanted = [reference(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
            if Transformers.spec(stored).layer_caches:  # several cache groups, which the bench does not have
                return _evolve(made, {"native": _native(stored), **_by_engine(directory, prompts, wanted, reference)})
            bench = ModelBench(Transformers, directory, prompts)
            found: list[list[torch.Tensor]] = [[], []]
            for chunks in CHUNKS:
                logits = bench.logits(chunks).split([count for _, _, count in chunks])
                for (sequence, _, _), part in zip(chunks, logits, strict=True):
                    found[sequence].append(part)
        except Exception as error:
            return _evolve(made, {"native": _native(stored), "refusal": f"{type(error).__name__}: {error}"})
        difference = max(
            float((torch.cat(parts) - logits).norm() / logits.norm())
            for parts, logits in zip(found, wanted, strict=True)
        )
        notes = [] if bench.model.no_graphs is None else ["without CUDA graphs"]
        if bench.model.experts:
            notes.append("experts unquantized")
        return _evolve(made, {"native": _native(stored), "difference": difference, "notes": tuple(notes)})


def _by_engine(directory: Path, prompts: list[list[int]], wanted: list[torch.Tensor], reference: Any) -> dict[str, Any]:
    """Compare log probabilities of greedy tokens that an engine generates."""
    from engine.core import Engine, SamplingParams
    from engine.testing.checkpoints import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_checkpoint(folder, tokenizer=True)
        with Engine(
            model=str(directory),
            model__tokenizer=str(tokenizer),
            model__name=FALLBACK,
            model__dtype="float32",
            executor__device="cpu",
            cache__memory="64MiB",
        ) as engine:
            greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
            found = [list(one.token_ids) for one in engine.generate(prompts, greedy)]
    for prompt, tokens in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        if logits.argmax(-1).tolist() != tokens:
            return {"refusal": "its greedy tokens are not those of transformers"}
    return {"difference": 0.0, "notes": ("greedy tokens compared",)}


def _evolve(made: Verdict, changes: Mapping[str, Any]) -> Verdict:
    import attrs

    return attrs.evolve(made, **changes)


def _without_checkpoint(model_type: str, architecture: str, error: Exception) -> dict[str, Any]:
    """What can be said without a tiny checkpoint: the refusal of the default config, else what went wrong."""
    import transformers

    library: Any = transformers
    try:
        config = {**library.CONFIG_MAPPING[model_type]().to_dict(), "architectures": [architecture]}
        refusal = Transformers.refuses(config)
    except Exception as second:
        refusal = f"{type(second).__name__}: {second}"
    if refusal is None:
        return {"refusal": f"not checked: no tiny checkpoint can be made ({type(error).__name__}: {error})"}
    return {"refusal": refusal.removeprefix(f"{architecture} ")}


def _native(config: Mapping[str, Any]) -> str:
    """The native plugin that serves a config.json; empty: none."""
    for one in load_plugins().models.candidates():
        if one.name != FALLBACK and one.load().refuses(config) is None:
            return one.name
    return ""


def _refuse_large(config: Any) -> None:
    """Raise ValueError for a config whose sizes are not small after all."""
    import transformers

    library: Any = transformers
    with torch.device("meta"):
        count = sum(one.numel() for one in library.AutoModelForCausalLM.from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} million parameters are left in the smallest config")


def _randomize(model: Any) -> None:
    """Draw norms and biases, which start as ones and zeros and would hide errors."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)

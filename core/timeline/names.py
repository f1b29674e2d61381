"""What a step is called in timelines and NVTX ranges: by its kind and size."""

from __future__ import annotations

from typing import Any

from engine.core.types import Step


def step_name(step: Step) -> str:
    """The kind and the size of a step, as "decode 64"."""
    if step.drafts:
        tokens = sum(chunk.count for chunk in step.chunks)
        verified = sum(len(part.tokens) - 1 for part in step.drafts)
        prompts = f" + {tokens} tokens" if tokens else ""
        return f"verify {verified} drafts, {len(step.decodes) + len(step.drafts)} decodes{prompts}"
    decodes, tokens = len(step.decodes), sum(chunk.count for chunk in step.chunks)
    if step.chunks and step.decodes:
        return f"mixed {decodes} decodes + {tokens} tokens"
    if step.chunks:
        return f"prefill {tokens} tokens"
    if not step.decodes:
        return "update"
    return f"decode {decodes}" if step.iterations == 1 else f"decode {decodes} x {step.iterations}"


def step_args(step: Step) -> dict[str, Any]:
    """Facts of a step, shown with its slice."""
    return {
        "step": step.id,
        "decodes": len(step.decodes) + len(step.drafts),
        **({"drafts": sum(len(part.tokens) - 1 for part in step.drafts)} if step.drafts else {}),
        "prefill_chunks": len(step.chunks),
        "prefill_tokens": sum(chunk.count for chunk in step.chunks),
    }

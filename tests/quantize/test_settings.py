from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import ConfigError
from engine.quantize.settings import CHOICES, DEFAULTS, Settings


@pytest.mark.parametrize("method", DEFAULTS)
def test_defaults_are_among_the_choices(method: Any) -> None:
    settings = Settings.choose(method, kv_cache="fp8" if method == "none" else None)
    for name, allowed in CHOICES[method].items():
        assert getattr(settings, name) in allowed
    cache = {"kv_cache": "fp8"} if method == "none" else {}
    assert settings.as_dict() == {"method": method, "ignore": [], **DEFAULTS[method], **cache}


@pytest.mark.parametrize(
    ("method", "given", "sentence"),
    [
        ("gptqq", {}, "did you mean gptq"),
        ("fp8", {"group_size": 64}, "--group-size means nothing to fp8; it is for rtn and gptq and awq"),
        ("rtn", {"act_order": "weight"}, "--act-order means nothing to rtn; it is for gptq"),
        ("fp8", {"granularity": "group"}, "--granularity group is not for fp8; use tensor or channel or block"),
        ("awq", {"bits": 8}, "--bits 8 is not for awq; use 4"),
        ("rtn", {"format": "awq", "bits": 8}, "the format awq has 4 bits"),
        ("gptq", {"group_size": 48}, "power of two"),
        ("gptq", {"group_size": 0}, "power of two"),
        ("gptq", {"damp": 0.0}, "--damp is a share"),
        ("gptq", {"format": "compressed-tensors", "act_order": "group"}, "use --act-order weight, or --format gptq"),
        ("fp8", {"granularity": "block", "activations": "static"}, "use --activations dynamic"),
        ("rtn", {"ignore": ("re:(",)}, "is no regular expression"),
        ("rtn", {"kv_cache": "int8"}, "--kv-cache int8 has no format of scales; use fp8"),
        ("gptq", {"kv_cache": "fp8"}, "the format gptq has no place for the scales of a KV cache; use --format compr"),
        ("rtn", {"kv_cache": "fp8", "format": "awq"}, "the format awq has no place for the scales of a KV cache"),
        ("none", {}, "nothing would be quantized; give --kv-cache fp8, or --method fp8 or int8 or rtn or gptq or awq"),
        ("none", {"kv_cache": "fp8", "bits": 8}, "--bits means nothing to none"),
        ("none", {"kv_cache": "fp8", "format": "gptq"}, "--format gptq is not for none; use compressed-tensors"),
        ("none", {"kv_cache": "fp8", "ignore": ("lm_head",)}, "--ignore means nothing to none"),
    ],
)
def test_settings_that_do_not_fit_are_an_error(method: Any, given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.choose(method, **given)
    assert sentence in str(caught.value)

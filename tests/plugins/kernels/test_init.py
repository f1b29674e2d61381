"""When kernels run in Triton's interpreter."""

from __future__ import annotations

import pytest

from engine.plugins.kernels import interpreted


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)])
def test_the_interpreter_is_what_triton_reads(monkeypatch, value, expected):
    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpreted() is expected

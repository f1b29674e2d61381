"""What makes Triton's interpreter quicker in tests is kept from Triton's compiler."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tests.interpreter import quicken


def test_quicken_changes_nothing_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = SimpleNamespace(_patch_lang=len)
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", interpreter)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    quicken()
    assert interpreter == SimpleNamespace(_patch_lang=len)

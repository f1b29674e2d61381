"""The reference that scripts/contract_reference.py makes of the contracts' source."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/contract_reference.py as a module; it imports its neighbours."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("contract_reference")


def described(reference: ModuleType, source: str) -> str:
    """What the reference says of the one class or function of `source`."""
    [node] = ast.parse(source).body
    return str(reference.describe(node, "engine.core.topic", {}))


def test_reference_describes_coroutines_like_other_methods_and_functions(reference: ModuleType) -> None:
    answers = described(
        reference,
        "class Routes(ABC):\n"
        "    @abstractmethod\n"
        "    async def respond(self, name: str) -> Reply:\n"
        '        """The reply."""\n',
    )
    assert "```python\n@abstractmethod\nasync def respond(self, name: str) -> Reply\n```\n\nThe reply." in answers
    waits = described(reference, 'async def wait(seconds: float) -> None:\n    """Wait."""\n')
    assert waits.startswith("### wait\n\n`from engine.core.topic import wait`")
    assert "async def wait(seconds: float) -> None" in waits


def test_reference_shows_the_decorators_that_say_how_a_method_is_called_in_the_order_of_the_source(
    reference: ModuleType,
) -> None:
    text = described(
        reference,
        "class Pool:\n"
        "    @staticmethod\n"
        "    @cache\n"
        "    def size(blocks: int) -> int:\n"
        '        """Bytes."""\n'
        "    @classmethod\n"
        "    @abstractmethod\n"
        "    def of(cls) -> Pool:\n"
        '        """A pool."""\n',
    )
    assert "```python\n@staticmethod\ndef size(blocks: int) -> int\n```" in text
    assert "```python\n@classmethod\n@abstractmethod\ndef of(cls) -> Pool\n```" in text


@pytest.mark.parametrize(
    ("value", "default"),
    [
        ("", ""),
        (" = 4", "`4`"),
        (" = field(repr=False)", ""),
        (" = field(default=1.0, validator=_number(0, 100))", "`1.0`"),
        (" = field(factory=dict, repr=False)", "`dict()`"),
        (" = attrs.field(default=())", "`()`"),
        (" = frozenset({1})", "`frozenset({1})`"),
    ],
)
def test_reference_gives_the_default_of_an_attribute_not_the_field_that_declares_it(
    reference: ModuleType, value: Any, default: str
) -> None:
    text = described(reference, f'class Params:\n    x: int{value}\n    """An x."""\n')
    assert f"| `x` | `int` | {default} | An x. |" in text


def test_reference_has_the_coroutines_of_the_routes(reference: ModuleType) -> None:
    routes = reference.contract_reference().partition("\n### Routes\n")[2].partition("\n### ")[0]
    assert "async def respond(self, " in routes
    assert "async def count_tokens(self, " in routes


def test_reference_has_the_attributes_of_suites_and_the_methods_that_plugin_authors_override(
    reference: ModuleType,
) -> None:
    testing = reference.contract_reference().partition("\n## Tests of plugins\n")[2]
    assert testing.count("Conformance\n\n`from engine.testing.") == 9
    suite = testing.partition("\n### QuantConformance\n")[2].partition("\n### ")[0]
    assert "`from engine.testing.quant import QuantConformance`" in suite
    assert "| `error` | `ClassVar[float]` | `0.0` | Maximum error" in suite
    assert "| `expert_size` | `ClassVar[int]` | `64` |" in suite
    assert [line for line in suite.splitlines() if line.startswith("def ")] == [
        "def store(self, name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]"
    ]
    assert "| `prompt_tokens` | `int` | `1` |" in testing

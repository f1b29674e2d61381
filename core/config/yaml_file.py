"""Reads the sections of a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.config.structure_errors import show
from engine.core.errors import ConfigError


def load_yaml(text: str, where: str) -> Mapping[str, Any]:
    """Parse a YAML mapping; an empty text is an empty one. Raises ConfigError, also for a duplicate key.

    where: the file, as errors name it.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses duplicate keys, of which SafeLoader silently takes the last, and values that contain themselves."""

        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self._open: list[str | None] = []
            """Anchors of the nodes around the one being read; None where a node has none."""

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            """Read a value; refuse an alias of a value around it."""
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent):
                if event.anchor in self._open:
                    problem, mark = f"the alias *{event.anchor} is within the value that it repeats", event.start_mark
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)  # type: ignore[arg-type]
                return super().compose_node(parent, index)
            self._open.append(event.anchor)
            node: yaml.Node | None = super().compose_node(parent, index)
            self._open.pop()
            return node

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            """Read a mapping; refuse a duplicate key. Merges (<<) are resolved later, and may repeat keys."""
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                if str(key.value) in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
                seen.add(str(key.value))
            return node

    try:
        found = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error
    except Exception as error:  # PyYAML passes on what int() or date() raise, and RecursionError
        raise ConfigError(f"{where} is not valid YAML: {type(error).__name__}: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{where}: expected sections, found {show(found)[1]}; write `model:` and its keys below it")
    return found

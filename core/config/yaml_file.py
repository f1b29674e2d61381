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
        """Refuses duplicate keys, of which SafeLoader silently takes the last."""

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

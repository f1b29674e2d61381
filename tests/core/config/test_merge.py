"""The configuration of an `Engine` made in Python."""

from __future__ import annotations

import os
from pathlib import Path

from engine.core.config.load import load_config
from engine.core.config.merge import merge_arguments
from engine.core.config.tree import OptionPlace


def test_options_keep_their_place_in_a_file_when_arguments_are_merged_with_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text("[scheduler.options]\na = 1\nb = 2\n")
    merged = merge_arguments(load_config(file).config, "model", {}, {"scheduler__options__b": 3})
    assert merged.scheduler.options == {"a": 1, "b": 3}
    assert merged.option_places == {
        "scheduler.options.a": OptionPlace(str(file), str(tmp_path)),
        "scheduler.options.b": OptionPlace("argument", os.getcwd()),
    }

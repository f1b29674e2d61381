from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.atomic_write import new_file, write_text


def test_write_text_replaces_a_file_and_leaves_no_other(tmp_path: Path) -> None:
    file = tmp_path / "a"
    for text in ("old", "new"):
        write_text(file, text)
        assert file.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [file]


def test_new_file_has_the_permissions_of_any_new_file_when_a_library_sets_others(tmp_path: Path) -> None:
    file, plain = tmp_path / "a", tmp_path / "plain"
    with new_file(file) as part:
        part.unlink()
        part.touch(mode=0o600)
    plain.touch()
    assert oct(file.stat().st_mode) == oct(plain.stat().st_mode)


def test_new_file_keeps_the_old_content_when_the_caller_raises(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_text(file, "old")

    def write_a_half() -> None:
        with new_file(file) as part:
            part.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_a_half()
    assert file.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_new_file_overwrites_what_a_killed_process_has_left(tmp_path: Path) -> None:
    file, left = tmp_path / "a", tmp_path / "a.part"
    left.write_text("rest")
    with new_file(file, left) as part:
        assert part.read_bytes() == b""
    assert list(tmp_path.iterdir()) == [file]

"""A model of the demo is made once, and is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import recipes


def test_a_model_is_made_once_and_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file or a folder is made again only if making it failed, or if it was deleted."""

    def maker(out: Path) -> None:
        calls.append(out.name)
        assert not out.exists()
        out.write_text("half")
        if len(calls) == 1:
            raise RuntimeError("no disk")

    calls: list[str] = []
    with pytest.raises(RuntimeError):
        recipes.make_once(tmp_path / "m.gguf", maker)
    for _ in range(2):
        recipes.make_once(tmp_path / "m.gguf", maker)
    assert calls == ["m.gguf", "m.gguf"]
    (tmp_path / "m.gguf").unlink()
    recipes.make_once(tmp_path / "m.gguf", maker)
    assert len(calls) == 3
    assert capsys.readouterr().out.count("making") == 3

"""What pictures share: headings, ticks, and files with the same bytes each time."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from compare_q.eval.plots import style


def figure(*, dark: bool = False, title: str = "Title", subtitle: str = "below") -> Figure:
    with style.canvas(3.0, title, subtitle, dark=dark) as (drawn, axes, _):
        axes.plot([1, 2], [3, 4], gid="line-0")
    return drawn


def test_saved_files_are_readable_and_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("a.png", "a.svg", "A.PDF")
    for folder, seconds in ("first", "1000000000"), ("second", "2000000000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)  # the time that matplotlib takes for now
        (tmp_path / folder).mkdir()
        for name in names:
            style.save_figure(figure(), tmp_path / folder / name)
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert sorted(file.name for file in (tmp_path / "first").iterdir()) == sorted(names)
    assert imread(tmp_path / "first" / "a.png").shape == (480, 1680, 4)
    svg = ElementTree.parse(tmp_path / "first" / "a.svg").getroot()
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert "line-0" in {element.get("id") for element in svg.iter()}
    assert (tmp_path / "first" / "A.PDF").read_bytes().startswith(b"%PDF-")

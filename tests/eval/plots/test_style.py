"""What pictures share: headings, ticks, and files with the same bytes each time."""

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from compare_q.eval.plots import looks, style


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


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.png, \.svg, \.pdf"):
        style.save_figure(figure(), tmp_path / "plot.png.txt")
    assert list(tmp_path.iterdir()) == []


def test_colours_can_be_told_apart_in_any_sight() -> None:
    """Machado's deuteranopia, protanopia, tritanopia (2009, severity 1), on linear light; 0.1 of a channel apart."""
    views = (
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
    )
    for theme, view in itertools.product((style.LIGHT, style.DARK), views):
        seen = []
        for colour in looks.COLOURS:
            linear = [((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour or theme.ink)]
            mixed = [sum(w * c for w, c in zip(row, linear, strict=True)) for row in view]
            seen.append([max(c, 0) ** (1 / 2.4) for c in mixed])
        assert (
            min(max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in itertools.combinations(seen, 2)) > 0.1
        )


def test_text_has_contrast_in_both_themes() -> None:
    """WCAG's 4.5 of text to its paper, for every group's labels and the muted words."""

    def light(colour: object) -> float:
        red, green, blue = (((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05

    for theme in (style.LIGHT, style.DARK):
        texts = [style.ink_of(colour or theme.ink, theme) for colour in looks.COLOURS] + [theme.muted, theme.ink]
        for text in texts:
            dim, bright = sorted((light(text), light(theme.paper)))
            assert bright / dim > 4.5


def test_a_heading_wraps_and_keeps_its_lines() -> None:
    drawn = figure(title="word " * 40, subtitle="first\n" + "second " * 30)
    axes = drawn.axes[0]
    below = axes.texts[0].get_text().splitlines()
    assert below[0] == "first"
    assert len(below) == 3
    assert len(axes.get_title(loc="left").splitlines()) == 4
    drawn.draw_without_rendering()
    title, text = axes._left_title.get_window_extent(), axes.texts[0].get_window_extent()
    assert title.y0 > text.y1 > text.y0 > axes.get_window_extent().y1
    assert title.y1 < drawn.bbox.y1


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((0.0008, 4.0), ["0.001", "0.002", "0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"]),
        ((1e-6, 2000), ["1e-5", "0.0001", "0.001", "0.01", "0.1", "1", "10", "100", "1,000"]),
        ((21, 47), ["24", "28", "32", "36", "40", "44"]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_plain_numbers(limits: tuple[float, float], expected: list[str]) -> None:
    with style.canvas(6.0, "", "", dark=False) as (_, axes, _):
        axes.set(yscale="log", ylim=limits)
        style.log_ticks(axes.yaxis)
        inside = [tick for tick in axes.get_yticks() if limits[0] < tick < limits[1]]
        assert axes.yaxis.get_major_formatter().format_ticks(inside) == expected
        assert not len(axes.yaxis.get_minorticklocs())

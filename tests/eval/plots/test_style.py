"""Properties of all pictures: looks of families, distinct colours, names, reproducible files."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from compare_q.backends.base import Storage
from compare_q.eval.plots import picture_style
from compare_q.eval.plots.picture_style import Theme
from compare_q.eval.results import ModelResult
from tests.support.figures import real_run

# Matrices of linear sRGB: Machado, Oliveira and Fernandes 2009, severity 1.
PROTANOPIA = [
    [0.152286, 1.052583, -0.204868],
    [0.114503, 0.786281, 0.099216],
    [-0.003882, -0.048116, 1.051998],
]
DEUTERANOPIA = [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.011820, 0.042940, 0.968881],
]
TRITANOPIA = [
    [1.255528, -0.076749, -0.178779],
    [-0.078411, 0.930809, 0.147602],
    [0.004733, 0.691367, 0.303900],
]
# Oklab (Björn Ottosson, 2020), from linear sRGB.
OKLAB_CONES = [
    [0.41222, 0.53633, 0.05145],
    [0.21190, 0.68070, 0.10740],
    [0.08830, 0.28172, 0.62998],
]
OKLAB_AXES = [
    [0.21045, 0.79362, -0.00407],
    [1.97800, -2.42859, 0.45059],
    [0.02590, 0.78277, -0.80868],
]


def model(label: str, weights: str = "", **fields: object) -> ModelResult:
    layers = [
        {
            "layers": "*",
            "count": 2,
            "weights": weights,
            "activations": "bfloat16",
            "kernel": "k",
            "asked": "",
        }
    ]
    bits = 4.0
    if weights == "bfloat16":
        bits = 16.0
    provenance: dict[str, Any] = {"layers": []}
    if weights:
        provenance["layers"] = layers
    return ModelResult.of(label, "fake", Storage(bits, bits), provenance=provenance, **fields)


@pytest.mark.parametrize(
    ("row", "family"),
    [
        (model("vLLM W8A8", "int8 channel"), "INT > 4 bits"),
        (model("a", "int4 g128"), "INT ≤ 4 bits"),
        (model("vLLM NVFP4", "nvfp4 g16"), "FP4"),
        (model("a", "mxfp4 g32"), "FP4"),
        (model("a", "fp8 token"), "FP8"),
        (model("a", "mxfp8 g32"), "FP8"),
        (model("a", "iq3_xxs"), "GGUF"),
        (model("a", "exl3 3.0 bpw"), "EXL3"),
        (model("a", "q6_K"), "GGUF"),
        (model("vLLM bf16", "bfloat16"), "unquantized"),
        (model("server of a quant"), "server"),
        (model("vLLM W8A8", "int8 channel", spec={"group": "mine"}), "mine"),
    ],
)
def test_the_family_is_the_spec_group_or_the_format_or_the_first_word(
    row: ModelResult, family: str
) -> None:
    assert picture_style.family_of(row) == family


def test_up_to_nine_families_have_nine_colours() -> None:
    models = [model(f"group{i}") for i in range(8)]
    looks = picture_style.looks_of([*models, model("a", "int4 g32")])
    assert len({look.colour for look in looks}) == 9
    assert picture_style.FAMILIES[looks[-1].colour].name == "INT ≤ 4 bits"
    looks = picture_style.looks_of([model(f"group{i}") for i in range(30)])
    assert {look.colour for look in looks} == set(range(9))


def test_each_engine_has_a_marker() -> None:
    marker_of_engine = {}
    for look in picture_style.looks_of(real_run().models):
        assert marker_of_engine.setdefault(look.engine, look.marker) == look.marker
    assert len(marker_of_engine) == len(set(marker_of_engine.values())) == 5


def linear(theme: Theme) -> Any:
    """Return the families' colours in linear sRGB, [families, 3]."""
    rgb = np.array([to_rgb(colour) for colour in theme.families])
    # The transfer function of sRGB (IEC 61966-2-1).
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("theme", [picture_style.LIGHT, picture_style.DARK])
def test_colours_differ_in_grey(theme: Theme) -> None:
    """Lightness (CIE L*) differs by at least 6; a difference of 2 is visible."""
    luminance = linear(theme) @ [0.2126, 0.7152, 0.0722]
    # Without the constant 16 of L*, which no difference has.
    lightness = np.sort(116 * np.cbrt(luminance))
    assert np.diff(lightness).min() > 5.9


@pytest.mark.parametrize("theme", [picture_style.LIGHT, picture_style.DARK])
@pytest.mark.parametrize("sight", [np.eye(3), PROTANOPIA, DEUTERANOPIA, TRITANOPIA])
def test_colours_differ_without_one_kind_of_cones(theme: Theme, sight: Any) -> None:
    """Colours differ by at least 0.06 in Oklab; a difference of 0.02 is visible."""
    cones = np.clip(linear(theme) @ np.array(sight).T, 0, 1) @ np.array(OKLAB_CONES).T
    colours = np.cbrt(cones) @ np.array(OKLAB_AXES).T
    assert min(np.linalg.norm(a - b) for a, b in combinations(colours, 2)) > 0.06


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["EXL3 4.0 [h8]", "W8A8 [a] †"], ["EXL3 4.0", "W8A8 †"]),
        (["EXL3 4.0 [h8]", "EXL3 4.0 [h6]", "EXL3 4.0"], None),
        (["EXL3 4.0 [h8] [a]", "EXL3 4.0 [h8]", "EXL3 4.0"], None),
        ([f"{'a' * 40}{i}{'b' * 40}" for i in range(3)], None),
        (
            ["Llama-3.1-8B-Instruct W4A16 g128 RTN, another label"],
            ["Llama-3.1-8B-Instruc...TN, another label"],
        ),
        (["", "[a]"], ["?", "[a]"]),
    ],
)
def test_names_are_short_where_no_other_label_becomes_the_same(
    labels: list[str], names: list[str] | None
) -> None:
    assert picture_style.names_of(labels) == (names or labels)


def test_saved_files_are_readable_and_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("a.png", "a.svg", "A.PDF")
    for folder, seconds in (("first", "1000000000"), ("second", "2000000000")):
        # Matplotlib uses it as the current time.
        monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)
        (tmp_path / folder).mkdir()
        for name in names:
            with picture_style.canvas(3.0, "Title", "below", dark=False) as (figure, axes, _):
                axes.plot([1, 2], [3, 4])
            picture_style.save_figure(figure, tmp_path / folder / name)
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert sorted(file.name for file in (tmp_path / "first").iterdir()) == sorted(names)
    assert imread(tmp_path / "first" / "a.png").size > 0
    root = ElementTree.parse(tmp_path / "first" / "a.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert (tmp_path / "first" / "A.PDF").read_bytes().startswith(b"%PDF-")

"""``compare-q where --recipe``, with an engine whose shares are known in advance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import compare_q as compare_q_package
from compare_q.backends.common.errors import InputError
from compare_q.eval.where.results import Recipe, WhereResult
from tests.support.restoring_engine import LOSSES, Where, scored, word

pytestmark = pytest.mark.usefixtures("trials_log")
DOWN = tuple(f"layers.{layer}.mlp.down_proj" for layer in (1, 0, 2))


def recipes_of(where: Where, file: Path, *flags: object, **options: Any) -> dict[str, Recipe]:
    """Run, assert success, and return target -> recipe."""
    ran = where("-o", file, *flags, **options)
    assert ran.status == 0, ran.err
    return {each.target: each for each in WhereResult.read(file).recipes}


def kld(recipe: Recipe) -> float:
    """Return the measured KLD of a recipe."""
    assert recipe.kld is not None
    return recipe.kld.value


def test_recipes_are_the_shortest_prefixes_and_measured(
    where: Where, tmp_path: Path, trials_log: Path
) -> None:
    words = []
    for target in ("kld=0.025", "kld=0.1", "kld=0.5", "bpw=8", "bpw=4.5", "bpw=99"):
        words += ["--recipe", target]
    recipes = recipes_of(where, tmp_path / "o.json", "--by", "matrix", *words)
    # 8 trials of parts and the whole; 2, 3 and 5 and 6 parts together, and 4 for kld=0.025.
    assert len(scored(trials_log)) == (8 + 4 + 1) * 8
    # 3 of down leave 0.03, and one of q 0.02.
    four = recipes["kld=0.025"]
    assert four.parts[:3] == DOWN
    assert len(four.parts) == 4
    assert kld(four) == pytest.approx(0.02)
    assert four.forecast is not None
    assert four.forecast.value == pytest.approx(0.02)
    assert four.bits == 1250 * 4.5 + 1000 * 11.5
    two = recipes["kld=0.1"]
    assert two.parts == DOWN[:2]
    assert two.modules == DOWN[:2]
    assert kld(two) == pytest.approx(0.08)
    none = recipes["kld=0.5"]
    assert (none.is_reached, none.parts, none.lists) == (True, (), ())
    assert kld(none) == pytest.approx(0.33)
    # One down has 7.26 bits per weight, two 10.02.
    assert recipes["bpw=8"].parts == DOWN[:1]
    assert kld(recipes["bpw=8"]) == pytest.approx(0.13)
    assert recipes["bpw=4.5"].parts == ()
    assert len(recipes["bpw=99"].parts) == 6
    assert kld(recipes["bpw=99"]) == pytest.approx(0, abs=1e-12)


def test_the_kld_of_a_recipe_is_measured_where_shares_do_not_add_up(
    where: Where, tmp_path: Path
) -> None:
    """Each part alone ends a common KLD of 0.1, which only one of them can."""
    recipes = recipes_of(
        where, tmp_path / "o.json", "--by", "kind", "--recipe", "kld=0.04", joint=0.1
    )
    recipe = recipes["kld=0.04"]
    # Of 0.43: down 0.4, at 900 weights; q 0.13, at 300 weights.
    assert recipe.parts == ("down",)
    assert kld(recipe) == pytest.approx(0.03)
    both = recipes_of(where, tmp_path / "o.json", "--by", "kind", "--recipe", "bpw=99", joint=0.1)
    assert kld(both["bpw=99"]) == pytest.approx(0, abs=1e-12)
    assert both["bpw=99"].forecast is not None
    assert both["bpw=99"].forecast.value == pytest.approx(0.43 - 0.4 - 0.13)


def test_a_target_that_cannot_be_reached(where: Where, tmp_path: Path) -> None:
    recipes = recipes_of(where, tmp_path / "o.json", "--by", r"layers\.0", "--recipe", "kld=0.1")
    recipe = recipes["kld=0.1"]
    assert not recipe.is_reached
    # The only part leaves 0.33 - 0.06.
    assert kld(recipe) == pytest.approx(0.27)
    assert recipe.lists == ()


def test_eight_bits_are_a_forecast(where: Where, tmp_path: Path, trials_log: Path) -> None:
    flags = ("--by", "kind", "--keep-bits", 8, "--recipe")
    recipes = recipes_of(where, tmp_path / "o.json", *flags, "kld=0.04", "--recipe", "bpw=7")
    recipe = recipes["kld=0.04"]
    assert recipe.parts == ("down",)
    assert recipe.kld is None
    assert recipe.forecast is not None
    # 4 bits more: the error falls by 4 ** 4.
    assert recipe.forecast.value == pytest.approx(0.33 - 0.3 * 255 / 256)
    assert recipe.bits == 1250 * 4.5 + 900 * 4
    # 7.38 bits per weight.
    assert recipes["bpw=7"].parts == ()
    assert any("forecast" in note for note in recipe.notes)
    # The front in 16 bits, and no further trial: q, down, lm_head, the whole, q and down.
    assert len(scored(trials_log)) == 5 * 8
    floor = recipes_of(where, tmp_path / "o.json", *flags, "kld=0.001")["kld=0.001"]
    assert not floor.is_reached
    assert floor.forecast is not None
    assert floor.forecast.value == pytest.approx(0.33 / 256)


def test_every_output_has_the_recipe(where: Where, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("o.json", "o.md", "o.html", "o.svg")]
    words: list[object] = []
    for flag, file in zip(("-o", "--markdown", "--html", "-pf"), files, strict=True):
        words += [flag, file]
    ran = where("--by", "kind", "--recipe", "kld=0.1", *words)
    assert ran.status == 0, ran.err
    text = r"layers\.\d+\.mlp\.down_proj"
    assert json.dumps(text)[1:-1] in ran.out
    assert "0.03000" in ran.out
    assert json.dumps(text)[1:-1] in files[1].read_text()
    page = files[2].read_text()
    assert "down_proj$" in page
    assert page.count("<svg") == 2
    assert "<svg" in (tmp_path / "o-recipes.svg").read_text()
    result = WhereResult.read(files[0])
    (recipe,) = result.recipes
    assert json.loads(recipe.lists[0].text)[0].endswith(text + "$")
    result.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == files[0].read_bytes()


@pytest.mark.parametrize(
    "words",
    [
        ("--recipe", "kld="),
        ("--recipe", "kld=-1"),
        ("--recipe", "bpw=2"),
        ("--recipe", "ppl=5"),
        ("--recipe", "kld=1", "--only"),
        ("--keep-bits", "8"),
        ("--keep-bits", "4", "--recipe", "kld=1"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    where: Where, words: tuple[str, ...], trials_log: Path
) -> None:
    ran = where(*words)
    assert ran.status == 2
    (error,) = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert ran.err.endswith(f"{error}\n")
    assert words[0] in error
    assert scored(trials_log) == []


def test_the_second_picture_is_checked_before_scoring(
    where: Where, tmp_path: Path, trials_log: Path
) -> None:
    (tmp_path / "p-recipes.png").mkdir()
    ran = where("-pf", tmp_path / "p.png", "--recipe", "kld=1")
    assert ran.status == 2
    assert "p-recipes.png" in ran.err.splitlines()[-1]
    assert scored(trials_log) == []


def test_python_finds_the_same_recipes(
    toy_model: Path, long_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (word("ref", toy_model), word("q4", toy_model, losses=LOSSES))
    found = compare_q_package.where(
        *words, "kind", str(long_text), recipes=["kld=0.1"], rows=8, eval_len=50, quiet=True
    )
    (recipe,) = found.result.recipes
    assert kld(recipe) == pytest.approx(0.03)
    found.plot_recipes(tmp_path / "front.svg")
    assert "<svg" in (tmp_path / "front.svg").read_text()
    for wrong in ({"recipes": "kld=1"}, {"recipes": ["kld"]}, {"keep_bits": 4}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            compare_q_package.where(*words, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="recipes"):
        compare_q_package.where(*words, only=True, recipes=["kld=1"])

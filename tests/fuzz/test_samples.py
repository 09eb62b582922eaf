"""Damaged samples of lm-eval: any file is compared, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given

from compare_q.eval.flips.comparing import Selection, compare
from compare_q.eval.flips.flips_report import csv_text, json_text, table_of_flips
from compare_q.eval.flips.sample_files import run_files
from compare_q.eval.table.markdown import markdown_text
from tests.support.hostile import answer_of, damaged, fuzzed, randoms
from tests.support.samples import sample, write

CHOICE = sample(0, 1)
TEXT = CHOICE | {
    "arguments": {"gen_args_0": {"arg_0": "Q", "arg_1": {"until": ["\n"], "temperature": 0.0}}},
    "filtered_resps": ["one", ["two"]],
    "metrics": ["acc", "f1"],
    "f1": [0, 1],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samples")


@fuzzed
@given(random=randoms)
def test_samples(folder: Path, random: Random) -> None:
    line = random.choice([CHOICE, TEXT])
    reference = run_files(str(write(folder / "ref", [line])))
    file = write(folder / "new", [])
    file.write_bytes(damaged(line, random))
    report = answer_of(lambda: compare(reference, [run_files(str(file))], Selection(margin=0.1)))
    if report:
        assert json_text(report)
        assert csv_text(report)
        assert markdown_text(table_of_flips(report))

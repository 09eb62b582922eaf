"""The data sets of compare_q's known names with their layout on the hub, with tiny contents.

The layouts (file names and the YAML of the cards) were read in November 2026 on the cards of:

- Salesforce/wikitext, commit b08601e04326c79dfdd32d625aee71d232d685c3;
- ptb-text-only/ptb_text_only and code-search-net/code_search_net, which are loading scripts with a
  parquet copy in ``refs/convert/parquet`` (commit 4ba6f7a48afb0ae5a8713c7d214561dff8a11c57); the
  path of the copy, ``{config}/{split}/0000.parquet``, is the one that the hub's converter writes;
- allenai/c4, with eight validation and 1,024 training files;
- HuggingFaceH4/ultrachat_200k, HuggingFaceH4/no_robots, HuggingFaceTB/smoltalk (the sets of
  ``eval/spec/chat_*.json``);
- HuggingFaceFW/fineweb and fineweb-edu.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.support.hub import Hub

CONVERTED = "refs/convert/parquet"
SPLITS = ("train", "validation", "test")


def parquet(rows: Sequence[Any], column: str = "text") -> bytes:
    """A parquet file of one column."""
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({column: list(rows)}), stream)
    return stream.getvalue()


def add(hub: Hub, name: str, files: dict[str, bytes], splits: dict[str, dict[str, str]]) -> None:
    """Add a data set whose card names the files of each configuration's splits."""
    text = "---\nconfigs:\n"
    for config, paths in splits.items():
        text += f"- config_name: {config}\n  data_files:\n"
        text += "".join(f"  - split: {split}\n    path: {path}\n" for split, path in paths.items())
    hub.add("datasets", name, {"README.md": f"{text}---\n# A data set\n", **files})


def rows(name: str, split: str = "test") -> list[str]:
    """Return three rows with the name of their data set; the second one is blank, as in WikiText."""
    return [f" = {name} {split} = \n", "", f"The second paragraph of {name} {split}.\n"]


def add_wikitext(hub: Hub) -> None:
    configs = ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-raw-v1", "wikitext-2-v1")
    files = {
        f"{c}/{s}-00000-of-00001.parquet": parquet(rows(c, s)) for c in configs for s in SPLITS
    }
    add(hub, "Salesforce/wikitext", files, {c: {s: f"{c}/{s}-*" for s in SPLITS} for c in configs})
    hub.renamed["datasets", "wikitext"] = "Salesforce/wikitext"


def add_scripts(hub: Hub) -> None:
    """Add the data sets that are still loading scripts, with the hub's parquet copies."""
    code = {
        s: parquet([f"def {s}_{i}(): pass" for i in range(1200)], "whole_func_string")
        for s in SPLITS
    }
    copies = {
        "ptb-text-only/ptb_text_only": {
            f"penn_treebank/{s}/0000.parquet": parquet(rows("ptb", s), "sentence") for s in SPLITS
        },
        "code-search-net/code_search_net": {
            f"{c}/{s}/0000.parquet": code[s] for c in ("go", "python") for s in SPLITS
        },
    }
    for name, files in copies.items():
        script = f"{name.partition('/')[2]}.py"
        hub.add("datasets", name, {"README.md": "# A data set\n", script: "import datasets\n"})
        hub.add("datasets", name, files, CONVERTED)


def add_c4(hub: Hub) -> None:
    """Add C4; nine training files are enough for a listing of several pages."""
    files = {}
    counts = {
        "en": {"train": 1024, "validation": 8},
        "realnewslike": {"train": 512, "validation": 1},
    }
    for config, split, count in (
        (c, s, n) for c, splits in counts.items() for s, n in splits.items()
    ):
        for i in range(min(count, 9)):
            line = json.dumps({"text": f"c4 {config} {split} file {i}"}) + "\n"
            packed = gzip.compress(line.encode(), mtime=0)
            files[f"{config}/c4-{split}.{i:05d}-of-{count:05d}.json.gz"] = packed
    add(
        hub,
        "allenai/c4",
        files,
        {c: {s: f"{c}/c4-{s}.*.json.gz" for s in splits} for c, splits in counts.items()},
    )


def add_fineweb(hub: Hub) -> None:
    for name in ("fineweb", "fineweb-edu"):
        texts = ([f"{name} file {i} row {j}" for j in range(600)] for i in range(3))
        files = {
            f"sample/10BT/{i:03d}_00000.parquet": parquet(text) for i, text in enumerate(texts)
        }
        files["data/CC-MAIN-2024-10/000_00000.parquet"] = parquet(["another dump"])
        splits = {"default": {"train": "data/*/*"}, "sample-10BT": {"train": "sample/10BT/*"}}
        add(hub, f"HuggingFaceFW/{name}", files, splits)


def add_chats(hub: Hub) -> None:
    """Add data sets of two conversations, which contain the name of their data set; other splits
    cannot be read.
    """
    chats = {
        "HuggingFaceH4/ultrachat_200k": (
            "default",
            "data",
            ("test_sft", "train_sft", "test_gen", "train_gen"),
        ),
        "HuggingFaceH4/no_robots": ("default", "data", ("test", "train")),
        "HuggingFaceTB/smoltalk": ("all", "data/all", ("test", "train")),
    }
    for name, (config, folder, splits) in chats.items():
        talks = [
            [{"role": "user", "content": f"{name} {i}"}, {"role": "assistant", "content": "Yes."}]
            for i in (0, 1)
        ]
        contents: dict[str, list[Any]] = {s: ["not asked for"] for s in splits} | {splits[0]: talks}
        files = {
            f"{folder}/{s}-00000-of-00001.parquet": parquet(contents[s], "messages") for s in splits
        }
        add(hub, name, files, {config: {s: f"{folder}/{s}-*" for s in splits}})


def add_all(hub: Hub) -> None:
    """Add all data sets."""
    for each in (add_wikitext, add_scripts, add_c4, add_fineweb, add_chats):
        each(hub)

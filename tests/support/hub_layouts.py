"""The data sets behind compare_q's known names as they lie on the hub, with tiny contents.

The layouts (file names and the YAML of the cards) were read in November 2026 on the cards of:

- Salesforce/wikitext, commit b08601e04326c79dfdd32d625aee71d232d685c3;
- ptb-text-only/ptb_text_only and code-search-net/code_search_net, which are loading scripts with a parquet copy in
  ``refs/convert/parquet`` (commit 4ba6f7a48afb0ae5a8713c7d214561dff8a11c57); that the latter has
  ``{config}/{split}/0000.parquet`` is what the hub's converter writes;
- allenai/c4, with eight validation and 1,024 training files;
- HuggingFaceH4/ultrachat_200k, HuggingFaceH4/no_robots, HuggingFaceTB/smoltalk (the sets of ``eval/spec/chat_*.json``);
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
SCRIPT = "import datasets\n"


def parquet(rows: Sequence[Any], column: str = "text") -> bytes:
    """A parquet file of one column."""
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({column: list(rows)}), stream)
    return stream.getvalue()


def lines(rows: Sequence[str]) -> bytes:
    """JSON lines."""
    return "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()


def card(configs: dict[str, dict[str, str]]) -> str:
    """A data set card that names the files of each config's splits."""
    text = "---\nconfigs:\n"
    for config, splits in configs.items():
        text += f"- config_name: {config}\n  data_files:\n"
        text += "".join(f"  - split: {split}\n    path: {path}\n" for split, path in splits.items())
    return f"{text}---\n# A data set\n"


def rows(name: str, split: str = "test") -> list[str]:
    """Three rows that say whose they are; the second one is blank, as in WikiText."""
    return [f" = {name} {split} = \n", "", f"The second paragraph of {name} {split}.\n"]


def add_wikitext(hub: Hub) -> None:
    splits = ("train", "validation", "test")
    configs = ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-raw-v1", "wikitext-2-v1")
    files: dict[str, bytes | str] = {"README.md": card({c: {s: f"{c}/{s}-*" for s in splits} for c in configs})}
    for config in configs:
        files |= {f"{config}/{split}-00000-of-00001.parquet": parquet(rows(config, split)) for split in splits}
    hub.add("datasets", "Salesforce/wikitext", files)
    hub.renamed["datasets", "wikitext"] = "Salesforce/wikitext"


def add_scripts(hub: Hub) -> None:
    """Those that are still loading scripts, with the hub's parquet copies of them."""
    hub.add("datasets", "ptb-text-only/ptb_text_only", {"README.md": "# PTB\n", "ptb_text_only.py": SCRIPT})
    splits = ("train", "validation", "test")
    files = {f"penn_treebank/{s}/0000.parquet": parquet(rows("ptb", s), "sentence") for s in splits}
    hub.add("datasets", "ptb-text-only/ptb_text_only", files, CONVERTED)
    name = "code-search-net/code_search_net"
    hub.add("datasets", name, {"README.md": "# CodeSearchNet\n", "code_search_net.py": SCRIPT})
    code = {s: parquet([f"def {s}_{i}(): pass" for i in range(1200)], "whole_func_string") for s in splits}
    copies = {f"{c}/{s}/0000.parquet": code[s] for c in ("go", "python") for s in splits}
    hub.add("datasets", name, copies, CONVERTED)


def add_c4(hub: Hub) -> None:
    configs = {c: {s: f"{c}/c4-{s}.*.json.gz" for s in ("train", "validation")} for c in ("en", "realnewslike")}
    files: dict[str, bytes | str] = {"README.md": card(configs)}
    for config, train, validation in (("en", 1024, 8), ("realnewslike", 512, 1)):
        for split, count in (("train", train), ("validation", validation)):
            for i in range(count if split == "validation" else 9):  # nine of them are enough for a listing of pages
                packed = gzip.compress(lines([f"c4 {config} {split} file {i}"]), mtime=0)
                files[f"{config}/c4-{split}.{i:05d}-of-{count:05d}.json.gz"] = packed
    hub.add("datasets", "allenai/c4", files)


def add_fineweb(hub: Hub) -> None:
    for name in ("fineweb", "fineweb-edu"):
        configs = {"default": {"train": "data/*/*"}, "sample-10BT": {"train": "sample/10BT/*"}}
        files: dict[str, bytes | str] = {"README.md": card(configs)}
        files["data/CC-MAIN-2024-10/000_00000.parquet"] = parquet(["another dump"])
        for i in range(3):
            text = [f"{name} file {i} row {j}" for j in range(600)]
            files[f"sample/10BT/{i:03d}_00000.parquet"] = parquet(text)
        hub.add("datasets", f"HuggingFaceFW/{name}", files)


def add_chats(hub: Hub) -> None:
    """Each conversation of the two says whose it is; other splits hold none that could be read."""
    chats = {
        "HuggingFaceH4/ultrachat_200k": ("default", "data", ("test_sft", "train_sft", "test_gen", "train_gen")),
        "HuggingFaceH4/no_robots": ("default", "data", ("test", "train")),
        "HuggingFaceTB/smoltalk": ("all", "data/all", ("test", "train")),
    }
    for name, (config, folder, (split, *others)) in chats.items():
        talks = [[{"role": "user", "content": f"{name} {i}"}, {"role": "assistant", "content": "Yes."}] for i in (0, 1)]
        files: dict[str, bytes | str] = {
            "README.md": card({config: {each: f"{folder}/{each}-*" for each in (split, *others)}}),
            f"{folder}/{split}-00000-of-00001.parquet": parquet(talks, "messages"),
        }
        files |= {f"{folder}/{each}-00000-of-00001.parquet": parquet(["not asked for"], "messages") for each in others}
        hub.add("datasets", name, files)


def add_all(hub: Hub) -> None:
    """All of them."""
    for add in (add_wikitext, add_scripts, add_c4, add_fineweb, add_chats):
        add(hub)

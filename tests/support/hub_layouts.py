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
    """Return a parquet file of one column."""
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({column: list(rows)}), stream)
    return stream.getvalue()


def add(hub: Hub, name: str, files: dict[str, bytes], splits: dict[str, dict[str, str]]) -> None:
    """Add a data set whose card names the files of each configuration's splits."""
    text = "---\nconfigs:\n"
    for config, paths in splits.items():
        text += f"- config_name: {config}\n  data_files:\n"
        for split, path in paths.items():
            text += f"  - split: {split}\n    path: {path}\n"
    hub.add("datasets", name, {"README.md": f"{text}---\n# A data set\n", **files})


def rows(name: str, split: str = "test") -> list[str]:
    """Return three rows with their data set's name; the second one is blank, as in WikiText."""
    return [f" = {name} {split} = \n", "", f"The second paragraph of {name} {split}.\n"]


def add_wikitext(hub: Hub) -> None:
    files = {}
    splits = {}
    for config in ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-raw-v1", "wikitext-2-v1"):
        splits[config] = {split: f"{config}/{split}-*" for split in SPLITS}
        for split in SPLITS:
            files[f"{config}/{split}-00000-of-00001.parquet"] = parquet(rows(config, split))
    add(hub, "Salesforce/wikitext", files, splits)
    hub.renamed["datasets", "wikitext"] = "Salesforce/wikitext"


def add_scripts(hub: Hub) -> None:
    """Add the data sets that are still loading scripts, with the hub's parquet copies."""
    treebank = {}
    functions = {}
    for split in SPLITS:
        treebank[f"penn_treebank/{split}/0000.parquet"] = parquet(rows("ptb", split), "sentence")
        # More than the 1,000 functions that compare_q takes.
        code = [f"def {split}_{i}(): pass" for i in range(1200)]
        copy = parquet(code, "whole_func_string")
        for language in ("go", "python"):
            functions[f"{language}/{split}/0000.parquet"] = copy
    add_script(hub, "ptb-text-only/ptb_text_only", treebank)
    add_script(hub, "code-search-net/code_search_net", functions)


def add_script(hub: Hub, name: str, copies: dict[str, bytes]) -> None:
    """Add a data set that is a loading script, with parquet copies of its files."""
    script = f"{name.partition('/')[2]}.py"
    hub.add("datasets", name, {"README.md": "# A data set\n", script: "import datasets\n"})
    hub.add("datasets", name, copies, CONVERTED)


def add_c4(hub: Hub) -> None:
    """Add C4; nine training files are enough for a listing of several pages."""
    counts = {
        "en": {"train": 1024, "validation": 8},
        "realnewslike": {"train": 512, "validation": 1},
    }
    files = {}
    splits: dict[str, dict[str, str]] = {}
    for config, counts_of_splits in counts.items():
        splits[config] = {}
        for split, count in counts_of_splits.items():
            splits[config][split] = f"{config}/c4-{split}.*.json.gz"
            for i in range(min(count, 9)):
                line = json.dumps({"text": f"c4 {config} {split} file {i}"}) + "\n"
                # Without a time, the bytes and so the commit are the same in every run.
                packed = gzip.compress(line.encode(), mtime=0)
                files[f"{config}/c4-{split}.{i:05d}-of-{count:05d}.json.gz"] = packed
    add(hub, "allenai/c4", files, splits)


def add_fineweb(hub: Hub) -> None:
    for name in ("fineweb", "fineweb-edu"):
        files = {}
        for i in range(3):
            text = [f"{name} file {i} row {j}" for j in range(600)]
            files[f"sample/10BT/{i:03d}_00000.parquet"] = parquet(text)
        # This file belongs to the default configuration, not to sample-10BT.
        files["data/CC-MAIN-2024-10/000_00000.parquet"] = parquet(["another dump"])
        splits = {"default": {"train": "data/*/*"}, "sample-10BT": {"train": "sample/10BT/*"}}
        add(hub, f"HuggingFaceFW/{name}", files, splits)


def add_chats(hub: Hub) -> None:
    """Add data sets of two conversations, which contain the name of their data set."""
    ultrachat_splits = ("test_sft", "train_sft", "test_gen", "train_gen")
    add_chat(hub, "HuggingFaceH4/ultrachat_200k", "default", "data", ultrachat_splits)
    add_chat(hub, "HuggingFaceH4/no_robots", "default", "data", ("test", "train"))
    add_chat(hub, "HuggingFaceTB/smoltalk", "all", "data/all", ("test", "train"))


def add_chat(hub: Hub, name: str, config: str, folder: str, splits: Sequence[str]) -> None:
    """Add a data set of conversations; splits after the first one cannot be read."""
    conversations = []
    for i in (0, 1):
        question = {"role": "user", "content": f"{name} {i}"}
        conversations.append([question, {"role": "assistant", "content": "Yes."}])
    files = {}
    paths = {}
    for split in splits:
        contents: list[Any] = ["not asked for"]
        if split == splits[0]:
            contents = conversations
        files[f"{folder}/{split}-00000-of-00001.parquet"] = parquet(contents, "messages")
        paths[split] = f"{folder}/{split}-*"
    add(hub, name, files, {config: paths})


def add_all(hub: Hub) -> None:
    """Add all data sets."""
    add_wikitext(hub)
    add_scripts(hub)
    add_c4(hub)
    add_fineweb(hub)
    add_chats(hub)

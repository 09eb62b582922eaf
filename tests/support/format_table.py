"""The table of docs/formats.md: sizes and names by compare_q of the checkpoints in
``tests/support/downloads.py``.

``python -m tests.support.format_table`` writes it into the page.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from compare_q.backends.base import Storage
from compare_q.backends.checkpoint.checkpoint_config import CheckpointConfig
from compare_q.backends.checkpoint.folder import storage_of
from compare_q.backends.layers.schemes import declared, kv_cache
from tests.support import ROOT
from tests.support.checkpoints import ENDS, write_checkpoint
from tests.support.downloads import DOWNLOADS, Download

PAGE = ROOT / "docs" / "formats.md"
TABLE = re.compile(r"^\| checkpoint \|.*?(?=^$)", re.MULTILINE | re.DOTALL)
HEAD = "| checkpoint | layout stated in | bits by hand | bpw by hand | found | weights, activations | † expects |"


def folder_of(download: Download, folder: Path) -> Path:
    """Write a checkpoint into a folder, with the quantization in the file ``place``."""
    entries = {
        f"{name}.{part}": entry
        for name, parts in download.layers.items()
        for part, entry in parts.items()
    }
    ends = (
        ENDS
        if download.config.get("model_type") != "deepseek_v4"
        else {
            "embed.weight": ENDS["model.embed_tokens.weight"],
            "head.weight": ENDS["lm_head.weight"],
            "layers.0.hc_attn_fn": ("F32", 24, 16),
            "layers.0.attn.compressor.ape": ("F32", 4, 8),
            "layers.0.ffn.gate.tid2eid": ("I64", 10, 2),
            "layers.0.attn.attn_sink": ("F32", 4),
        }
    )
    if "backbone" in next(iter(download.layers)):
        ends = {"backbone.embeddings.weight": ENDS["model.embed_tokens.weight"], **ends}
        del ends["model.embed_tokens.weight"]
    config = dict(download.config)
    if download.place == "config.json":
        config["quantization_config"] = download.quantization
    elif download.place == "text_config":
        config["text_config"] = {"quantization_config": download.quantization}
    write_checkpoint(folder, {**ends, **entries}, config, download.values)
    if download.place == "hf_quant_config.json":
        (folder / download.place).write_text(json.dumps(download.quantization))
    return folder


def look(download: Download) -> tuple[Storage, CheckpointConfig]:
    """Return the size that compare_q finds, and the config that it reads."""
    with tempfile.TemporaryDirectory() as folder:
        return storage_of(folder_of(download, Path(folder))), CheckpointConfig.read(Path(folder))


def row(name: str, download: Download) -> str:
    """Return the table's row of one checkpoint."""
    storage, config = look(download)
    bpw = download.bits / download.weights
    found = "n/a" if storage.bpw_layer is None else f"{storage.bpw_layer:.4f}"
    schemes = dict.fromkeys(declared(config.quantization).of(layer) for layer in download.layers)
    words = "; ".join(
        "unknown" if each is None else f"{each.weights}, {each.activations or '—'}"
        for each in schemes
    )
    cached = kv_cache(config.quantization)
    words += f"; KV {cached}" if cached else ""
    asked = "; ".join(
        "unknown" if each is None else each.activations or "the model's dtype" for each in schemes
    )
    return f"| {name} | {download.source} | {download.worked} | {bpw:.4f} | {found} | {words} | {asked} |"


def table() -> str:
    """The whole table, in Markdown."""
    rows = [row(name, download) for name, download in DOWNLOADS.items()]
    return "\n".join([HEAD, "|---|---|---|--:|--:|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text("utf-8")), "utf-8")

"""The table of docs/formats.md: sizes and names of the checkpoints in tests/support/downloads.py.

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
HEAD = (
    "| checkpoint | layout stated in | bits by hand | bpw by hand | found | weights, activations "
    "| † expects |"
)
DEEPSEEK_ENDS = {
    "embed.weight": ENDS["model.embed_tokens.weight"],
    "head.weight": ENDS["lm_head.weight"],
    "layers.0.hc_attn_fn": ("F32", 24, 16),
    "layers.0.attn.compressor.ape": ("F32", 4, 8),
    "layers.0.ffn.gate.tid2eid": ("I64", 10, 2),
    "layers.0.attn.attn_sink": ("F32", 4),
}
"""Embeddings, head and unquantized tensors of DeepSeek V4, by its names."""


def folder_of(download: Download, folder: Path) -> Path:
    """Write a checkpoint into a folder, with the quantization in the file ``place``."""
    entries = {}
    for name, parts in download.layers.items():
        for part, entry in parts.items():
            entries[f"{name}.{part}"] = entry
    ends = ENDS
    if download.config.get("model_type") == "deepseek_v4":
        ends = DEEPSEEK_ENDS
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
    bpw = f"{download.bits / download.weights:.4f}"
    measured_bpw = "n/a"
    if storage.bpw_layer is not None:
        measured_bpw = f"{storage.bpw_layer:.4f}"
    declaration = declared(config.quantization)
    schemes = dict.fromkeys(declaration.of(layer) for layer in download.layers)
    formats = []
    expected = []
    for scheme in schemes:
        if scheme is None:
            formats.append("unknown")
            expected.append("unknown")
        else:
            formats.append(f"{scheme.weights}, {scheme.activations or '—'}")
            expected.append(scheme.activations or "the model's dtype")
    cached = kv_cache(config.quantization)
    if cached:
        formats[-1] += f"; KV {cached}"
    cells = [name, download.source, download.worked, bpw, measured_bpw]
    cells += ["; ".join(formats), "; ".join(expected)]
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    """Return the whole table, in Markdown."""
    rows = [row(name, download) for name, download in DOWNLOADS.items()]
    return "\n".join([HEAD, "|---|---|---|--:|--:|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text("utf-8")), "utf-8")

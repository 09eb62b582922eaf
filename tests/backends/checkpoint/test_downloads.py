"""Checkpoints as they are downloaded: their size, schemes, KV cache and mark against texts and numbers by hand."""

from __future__ import annotations

import pytest

from backends.base import Storage
from backends.layers.groups import deviation
from backends.layers.schemes import declared
from tests.support.downloads import DOWNLOADS
from tests.support.format_table import PAGE, TABLE, look, table


@pytest.mark.parametrize("name", DOWNLOADS)
def test_sizes_schemes_and_kv_cache(name: str) -> None:
    """Beside a head of 640 bits at 16 bits a weight."""
    download = DOWNLOADS[name]
    storage, config = look(download)
    assert storage == Storage(download.bits / download.weights, 16.0, download.bits + 640)
    stated = declared(config.quantization)
    assert tuple(stated.of(layer) for layer in download.layers) == download.schemes
    assert config.kv_cache == download.kv


@pytest.mark.parametrize("name", DOWNLOADS)
def test_mark(name: str) -> None:
    """No mark where the activations ran that are asked for; a mark where others did."""
    for scheme in DOWNLOADS[name].schemes:
        assert scheme is not None
        asked = scheme.activations or "bfloat16"
        assert deviation(asked, asked) == ""
        assert deviation(asked, "bfloat16") == scheme.activations
        assert deviation(asked, "int8 token") == asked


def test_page_has_this_table() -> None:
    """If it has not: ``python -m tests.support.format_table`` writes it."""
    found = TABLE.search(PAGE.read_text("utf-8"))
    assert found is not None
    assert found[0] == table()

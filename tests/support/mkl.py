"""The CPU type that the MKL inside torch has detected, read from MKL's own variable."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np
import torch

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
NAME = b"mkl_vml_serv_cpu_detect.vml_cpu_type"
SYMBOL_TABLE = 2
SECTION, SYMBOL = np.dtype("u4,u4,u8,u8,u8,u8,u4,u4,u8,u8"), np.dtype("u4,u1,u1,u2,u8,u8")
"""``Elf64_Shdr`` and ``Elf64_Sym``."""


def address() -> int | None:
    """Return the address of the variable in the library; None if this torch has no variable of this
    name.
    """
    if not LIBRARY.exists():
        return None
    content = np.memmap(LIBRARY, np.uint8, "r")
    (table,), (count,) = struct.unpack("<Q", content[40:48]), struct.unpack("<H", content[60:62])
    sections = np.frombuffer(content[table : table + 64 * count].tobytes(), SECTION)
    for section in sections[sections["f1"] == SYMBOL_TABLE]:
        names = sections[section["f6"]]
        text = content[names["f4"] : names["f4"] + names["f5"]].tobytes()
        if (at := text.find(b"\0" + NAME + b"\0") + 1) > 0:
            symbols = np.frombuffer(
                content[section["f4"] : section["f4"] + section["f5"]].tobytes(), SYMBOL
            )
            return int(symbols["f4"][symbols["f0"] == at][0])
    return None


def cpu_type() -> int:
    """Return MKL's number of the CPU type; -1 before MKL has detected it."""
    begin = min(
        int(line.split("-")[0], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(LIBRARY.name)
    )
    at = address()
    assert at is not None
    return ctypes.c_int.from_address(begin + at).value

"""The CPU type that the MKL inside torch has detected, read from MKL's own variable."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
NAME = b"mkl_vml_serv_cpu_detect.vml_cpu_type"
# ``SHT_SYMTAB`` of elf.h.
SYMBOL_TABLE = 2
SECTION = np.dtype(
    [
        ("name", "u4"),
        ("type", "u4"),
        ("flags", "u8"),
        ("address", "u8"),
        ("offset", "u8"),
        ("size", "u8"),
        ("link", "u4"),  # of a symbol table: the section of its names
        ("info", "u4"),
        ("alignment", "u8"),
        ("entry_size", "u8"),
    ]
)
"""``Elf64_Shdr``."""
SYMBOL = np.dtype(
    [
        ("name", "u4"),  # its place in the section of names
        ("info", "u1"),
        ("other", "u1"),
        ("section", "u2"),
        ("address", "u8"),
        ("size", "u8"),
    ]
)
"""``Elf64_Sym``."""


def address() -> int | None:
    """Return the address of the variable in torch's library; None if it is not there."""
    if not LIBRARY.exists():
        return None
    content = np.memmap(LIBRARY, np.uint8, "r")
    # ``e_shoff`` and ``e_shnum`` of ``Elf64_Ehdr``; each section header has 64 bytes.
    (table,) = struct.unpack("<Q", content[40:48])
    (count,) = struct.unpack("<H", content[60:62])
    sections = np.frombuffer(content[table : table + 64 * count].tobytes(), SECTION)
    for section in sections[sections["type"] == SYMBOL_TABLE]:
        names = section_content(content, sections[section["link"]])
        # The name begins after the zero that ends the name before it.
        place = names.find(b"\0" + NAME + b"\0") + 1
        if place > 0:
            symbols = np.frombuffer(section_content(content, section), SYMBOL)
            return int(symbols["address"][symbols["name"] == place][0])
    return None


def section_content(content: NDArray[np.uint8], section: Any) -> bytes:
    """Return the bytes of a section of an ELF file."""
    begin = int(section["offset"])
    end = begin + int(section["size"])
    return content[begin:end].tobytes()


def cpu_type() -> int:
    """Return MKL's number of the CPU type; -1 before MKL has detected it."""
    beginnings = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(LIBRARY.name):
            beginnings.append(int(line.split("-")[0], 16))
    at = address()
    assert at is not None
    # The segments of the library are mapped one by one; addresses count from the first.
    return ctypes.c_int.from_address(min(beginnings) + at).value

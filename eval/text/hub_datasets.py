"""Read rows of data sets of the hub; common data sets are known by name.

For a known name only the files of its split are downloaded, into the hub's cache (``backends/hub.py``).
``datasets.load_dataset`` would download every split of a configuration, 327 GB for c4.  If only the first rows are
needed, they are streamed, so that only the first file is read.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from compare_q.backends import hub
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import exists
from compare_q.backends.common.messages import nearest
from compare_q.backends.hub import HubAwayError
from compare_q.eval.common import processes
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs import reading
from compare_q.eval.specs.types import DataSpec, texts_in

FIRST_ROWS = re.compile(r"(?P<split>[\w.-]+)\[:(?P<rows>\d+)\]")
ONE_SPLIT = re.compile(r"(?P<split>[\w.-]+)(\[[^\]]*\])?")
PICKLES = "pandas"
"""The format of ``datasets`` that loads pickles, which are code; ``datasets`` itself refuses it from 5.2 on."""
PICKLED = re.compile(r"\.(pkl|pickle|dill|joblib|pth?|npy|npz)(\.(gz|bz2|xz|zst|zip|lz4))?($|[?#])", re.IGNORECASE)
"""Ends of the names of files that may hold pickles, perhaps compressed."""
LOADERS = {
    "arrow",
    "audiofolder",
    "conll",
    "csv",
    "eval",
    "fasta",
    "fastq",
    "genbank",
    "harbor",
    "hdf5",
    "iceberg",
    "imagefolder",
    "json",
    "lance",
    "meshfolder",
    "mmcif",
    "niftifolder",
    "pandas",
    "parquet",
    "pdb",
    "pdffolder",
    "text",
    "tsfile",
    "videofolder",
    "vortex",
    "webdataset",
    "xml",
}
"""Names of the loaders of ``datasets`` 5.2 for files.  Any other name that is no folder is a data set of the hub."""
COMMIT = re.compile(r"[0-9a-f]{40}")
ASK_S = 10.0
"""Seconds in which a server must return the version of its text."""
CONVERTED = "refs/convert/parquet"
"""The branch with the hub's own parquet copy; datasets refuses loading scripts since version 4."""


@dataclass(frozen=True)
class Source:
    """The arguments of ``datasets.load_dataset``, and a name for titles; part of the tokens' cache key."""

    path: str
    name: str | None = None
    split: str = "test"
    column: str = "text"
    display: str = ""
    data_files: Any = None
    pattern: str = ""  # the files of a split in the repository, with ``{split}`` for the name of the split
    revision: str | None = None
    streamed: bool = False  # never downloaded as a whole

    @property
    def base_split(self) -> str:
        """The split without a slice."""
        match = ONE_SPLIT.match(self.split)
        return match["split"] if match else self.split

    @property
    def patterns(self) -> list[str]:
        """The files of the split; empty if the library has to find them."""
        return [self.pattern.format(split=self.base_split)] if self.pattern else []

    @property
    def is_local(self) -> bool:
        """True if the data set is in files of this machine."""
        if exists(Path(self.path)):
            return True
        # The files of a data set on the hub are named without "://", too.
        names = texts_in(self.data_files)
        return self.path in LOADERS and bool(names) and not any("://" in name for name in names)

    def is_streamed(self, limit: int) -> bool:
        """Return True if only the first rows are read.  Streams have no slices; ``train[:1000]`` is cut here instead.

        ``limit``: as from ``row_limit``.
        """
        if "[" in self.split:
            return FIRST_ROWS.fullmatch(self.split) is not None
        return limit > 0 or self.streamed

    def is_fetched(self, limit: int) -> bool:
        """Return True if the files of a known name's split are downloaded and read in the hub's cache."""
        whole = ONE_SPLIT.fullmatch(self.split) is not None and not self.is_streamed(limit)  # not "train+test"
        return bool(self.pattern) and not self.streamed and whole


WIKITEXT2 = Source(
    "Salesforce/wikitext", "wikitext-2-raw-v1", display="wikitext2", pattern="wikitext-2-raw-v1/{split}-*"
)
WIKITEXT103 = Source(
    "Salesforce/wikitext", "wikitext-103-raw-v1", display="wiki103", pattern="wikitext-103-raw-v1/{split}-*"
)
WEB_TEXT, SAMPLE = "plain_text/{split}/*.parquet", "sample/10BT/*.parquet"
SOURCES = {
    "wiki2": WIKITEXT2,
    "wikitext2": WIKITEXT2,
    "wiki103": WIKITEXT103,
    "wikitext103": WIKITEXT103,
    # 1,000 functions in Python, about as much text as WikiText-2's test split; the whole split is 29 MB.
    "code": Source(
        "code-search-net/code_search_net", "python", "test[:1000]", "whole_func_string", "CodeSearchNet",
        pattern="python/{split}/*.parquet", revision=CONVERTED,
    ),
    "ptb": Source(
        "ptb-text-only/ptb_text_only", column="sentence", display="PTB", pattern="penn_treebank/{split}/*.parquet",
        revision=CONVERTED,
    ),
    "lambada": Source("EleutherAI/lambada_openai", "default", display="lambada"),
    "tinystories": Source(
        "roneneldan/TinyStories", split="validation", display="TinyStories", pattern="data/{split}-*.parquet"
    ),
    # To fetch one file the client would first list all of them, in every language.
    "c4": Source(
        "allenai/c4", "en", split="validation", display="c4", pattern="en/c4-{split}.*.json.gz", streamed=True
    ),
    "openwebtext10k": Source(
        "stas/openwebtext-10k", split="train", display="openwebtext", pattern=WEB_TEXT, revision=CONVERTED
    ),
    "openwebtext": Source(
        "Skylion007/openwebtext", split="train[:1000]", display="openwebtext", pattern=WEB_TEXT, revision=CONVERTED
    ),
    "fineweb": Source("HuggingFaceFW/fineweb", "sample-10BT", "train[:1000]", display="fineweb", pattern=SAMPLE),
    "fineweb-edu": Source(
        "HuggingFaceFW/fineweb-edu", "sample-10BT", "train[:1000]", display="fineweb-edu", pattern=SAMPLE
    ),
}  # fmt: skip


def source_of(spec: DataSpec) -> Source:
    """Return the known source with every key that the spec sets; if these name other files, without its file pattern.

    InputError for pickles, before they are read.
    """
    known = SOURCES.get(spec.dataset.lower(), Source(spec.dataset))
    moved = spec.dataset_path or spec.dataset_name or spec.dataset_data_files
    path = spec.dataset_path or known.path
    pickled = [name for name in texts_in(spec.dataset_data_files) if PICKLED.search(name) and path != "text"]
    if path == PICKLES or pickled:
        why = "may be a pickle, which can run any code; give .jsonl, .parquet or text"
        raise InputError(f"dataset {spec.dataset!r}: {(*pickled, path)[0]} {why}")
    return Source(
        path=spec.locate(spec.dataset_path or known.path),
        name=spec.dataset_name or known.name,
        split=spec.dataset_split or spec.split or known.split,
        column=spec.text_column or known.column,
        display=known.display,
        data_files=map_names(spec.dataset_data_files, spec.locate) or known.data_files,
        pattern="" if moved else known.pattern,
        revision=spec.revision or (None if spec.dataset_path else known.revision),
        streamed=known.streamed and not moved,
    )


def is_remote(spec: DataSpec) -> bool:
    """True if the text may change without a change of a file on this machine: at a URL, or on the hub."""
    if spec.path is not None:
        return False
    source = source_of(spec)
    return not source.is_local and COMMIT.fullmatch(source.revision or "") is None


def version(spec: DataSpec) -> str:
    """Return the version of a remote text: entity tags of its URLs, or the commit of its data set; "" if unknown."""
    from huggingface_hub import HfApi

    source = source_of(spec)
    urls = [name for name in texts_in(source.data_files) if "://" in name]
    try:
        if not urls:
            return str(HfApi().dataset_info(source.path, revision=source.revision, timeout=ASK_S).sha or "")
        found = []
        for url in urls:
            with urlopen(Request(url, method="HEAD"), timeout=ASK_S) as answer:
                told = [answer.headers.get(name) or "" for name in ("ETag", "Last-Modified", "Content-Length")]
                found.append(told if any(told[:2]) else [])
    except Exception:  # offline, refused, or a scheme that only fsspec knows
        return ""
    return json.dumps(found) if all(found) else ""


def map_names(names: Any, change: Callable[[str], str]) -> Any:
    """Apply ``change`` to each file name in a string, list or mapping, as load_dataset takes them."""
    if isinstance(names, str):
        return change(names)
    if isinstance(names, list):
        return [map_names(name, change) for name in names]
    return {key: map_names(value, change) for key, value in names.items()} if isinstance(names, dict) else names


def row_limit(spec: DataSpec) -> int:
    """Return the maximum number of rows of the data set, 0 for all.  If both keys are set, ``max_text_rows`` counts."""
    rows = spec.max_dataset_rows
    if "max_text_rows" in spec.model_fields_set:
        rows = spec.max_text_rows
    return min(rows or 0, sys.maxsize)  # itertools takes no larger number


@contextmanager
def in_one_line(spec: DataSpec, source: Source) -> Iterator[None]:
    """Turn errors of a data set into an InputError with its name in the spec, its path, the reason, a similar name."""
    try:
        yield
    except Exception as error:  # datasets, fsspec, pyarrow and the hub client each raise their own
        if isinstance(error, InputError) and str(error).startswith("dataset "):
            raise
        why = str(error)
        if not isinstance(error, InputError):
            why = hub.failure_reason(error, "dataset", source.path, source.revision)
        hint = "" if spec.dataset.lower() in SOURCES else nearest(spec.dataset, SOURCES)
        bare = why.removeprefix(f"{source.path}: ")
        raise InputError(f"dataset {spec.dataset!r}: cannot load {source.path}: {bare}{hint}") from None


def fetch(spec: DataSpec, progress: Progress) -> None:
    """Download the files of a known data set if they are read whole; InputError with the reason.

    Called before the files are read, because two progress bars cannot be shown at once.
    """
    source = source_of(spec)
    if spec.path is None and source.is_fetched(row_limit(spec)):
        with in_one_line(spec, source), progress.phase(f"fetching {source.path}", unit="bytes") as phase:
            hub.fetch("dataset", source.path, source.revision, source.patterns, phase)


def hub_records(spec: DataSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (the row's name in errors, its values) for each row; InputError if the data set cannot be read."""
    source = source_of(spec)
    first = FIRST_ROWS.fullmatch(source.split)
    with in_one_line(spec, source):
        rows = itertools.islice(split_rows(source, row_limit(spec)), int(first["rows"]) if first else None)
        for number, row in enumerate(rows, 1):
            yield f"dataset {source.path!r}: row {number}", row


def split_rows(source: Source, limit: int) -> Any:
    """Return the rows of a split, as a data set or stream of ``datasets``."""
    library = quiet_library()
    if source.is_fetched(limit):
        folder = hub.fetch("dataset", source.path, source.revision, source.patterns)
        files = {source.base_split: sorted(str(file) for file in folder.glob(source.patterns[0]))}
        builder = "json" if ".json" in source.pattern else "parquet"
        # Local files can be streamed; only a slice needs the library's own copy of them.
        stream = "[" not in source.split
        return library.load_dataset(builder, data_files=files, split=source.split, streaming=stream)
    if source.is_streamed(limit):
        return ask_library(library.load_dataset, source, split=source.base_split, streaming=True)
    # The library identifies local files by name and time, and files at a URL that has no entity tag by its name alone:
    # it may return cached rows of other files.
    may_change = exists(Path(source.path)) or texts_in(source.data_files)
    anew = {"download_mode": "force_redownload", "verification_mode": "no_checks"} if may_change else {}
    return ask_library(library.load_dataset, source, split=source.split, **anew)


def ask_library(call: Callable[..., Any], source: Source, **keys: Any) -> Any:
    """Call ``load_dataset`` or its builder; use the library's cache if the hub cannot be reached."""
    from datasets import packaged_modules

    files = {source.base_split: source.patterns} if source.pattern else source.data_files
    name = None if source.pattern else source.name
    asked = {"name": name, "data_files": files, "revision": source.revision, **keys}
    try:
        if Path(source.path).is_file():
            raise InputError('is a file; give "dataset": "text" and the file as "path"')
        if not Path(source.path).exists() and source.path not in packaged_modules._PACKAGED_DATASETS_MODULES:
            if "/" not in source.path:
                raise InputError("unknown name; data sets of the hub are named owner/name")
            hub.look_up("dataset", source.path, source.revision, files=False)
        return call(source.path, **asked)
    except HubAwayError as error:
        try:
            with hub.offline():
                return call(source.path, **asked)
        except Exception:  # the library raises different errors in each of its steps
            raise InputError(f"not in the local cache, and {str(error).removeprefix(f'{source.path}: ')}") from None
    except FileNotFoundError:
        if not source.pattern:
            raise
        raise InputError(f"no file {source.patterns[0]} on the hub") from None


def would_fetch(spec: DataSpec) -> str:
    """Describe the download of a data set of the hub, e.g. ``Salesforce/wikitext, 0.7 MB to download``.

    Downloads no data (``datasets`` reads the data set's card).  InputError with the reason if the data set, its
    configuration or its split does not exist.
    """
    source = source_of(spec)
    if source.is_fetched(row_limit(spec)):
        with in_one_line(spec, source):
            size = hub.would_fetch(source.path, source.revision, source.patterns, repo_type="dataset")
        return f"{source.path}, {size}"
    processes.run_in_subprocess(check_split, f"asking for {source.path}", spec=reading.as_json(spec))
    return ", ".join(filter(None, (source.path, source.name, source.split)))


def check_split(spec: Mapping[str, Any]) -> None:
    """Raise InputError unless ``datasets`` finds the data set, the configuration and the split of a packed ``spec``."""
    unpacked = reading.from_json(spec)
    source = source_of(unpacked)
    with in_one_line(unpacked, source):
        builder = ask_library(quiet_library().load_dataset_builder, source)
        splits = list(map(str, builder.config.data_files or builder.info.splits or ()))
        if splits and source.base_split not in splits:
            raise InputError(f"no split {source.base_split!r}; there are: {', '.join(splits)}")


def quiet_library() -> Any:
    """Import ``datasets`` without progress bars, warnings and requests to the data set viewer.

    ``datasets`` requests a data set's features from the viewer, for up to 100 s; the files contain them as well.
    """
    import datasets
    from huggingface_hub import utils

    datasets.disable_progress_bars()
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    datasets.utils.logging.set_verbosity_error()
    datasets.config.USE_PARQUET_EXPORT = False
    return datasets

"""Read rows of data sets of the hub; common data sets are known by name.

For a known name only the files of its split are downloaded, into the hub's cache
(``backends/hub.py``).  ``datasets.load_dataset`` would download every split of a configuration, 327
GB for c4.  If only the first rows are needed, they are streamed, so that only the first file is
read.
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

from ...backends import hub
from ...backends.common.errors import InputError
from ...backends.common.json_files import exists
from ...backends.common.message_text import nearest
from ...backends.hub import HubUnreachableError
from ..common import processes
from ..common.progress import Progress
from ..specs import spec_files
from ..specs.spec_types import DataSpec, strings_in

FIRST_ROWS = re.compile(r"(?P<split>[\w.-]+)\[:(?P<rows>\d+)\]")
ONE_SPLIT = re.compile(r"(?P<split>[\w.-]+)(\[[^\]]*\])?")
PICKLE_LOADER = "pandas"
"""The format of ``datasets`` that loads pickles, which are code; ``datasets`` itself refuses it
from 5.2 on."""
PICKLE_NAME = re.compile(
    r"\.(pkl|pickle|dill|joblib|pth?|npy|npz)(\.(gz|bz2|xz|zst|zip|lz4))?($|[?#])", re.IGNORECASE
)
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
"""Names of the loaders of ``datasets`` 5.2 for files.

Any other name is a folder or a data set of the hub.
"""
COMMIT = re.compile(r"[0-9a-f]{40}")
VERSION_S = 10.0
"""Seconds in which a server must return the version of its text."""
CONVERTED_BRANCH = "refs/convert/parquet"
"""The branch with the hub's own parquet copy; datasets refuses loading scripts since version 4."""


@dataclass(frozen=True)
class Source:
    """The arguments of ``datasets.load_dataset``, and a name for titles.

    The names of these fields are part of the tokens' cache key.

    Attributes:
        pattern: the files of a split in the repository, with ``{split}`` for the name of the split.
        streamed: never downloaded as a whole.
    """

    path: str
    name: str | None = None
    split: str = "test"
    column: str = "text"
    display: str = ""
    data_files: Any = None
    pattern: str = ""
    revision: str | None = None
    streamed: bool = False

    @property
    def base_split(self) -> str:
        """The split without a slice."""
        match = ONE_SPLIT.match(self.split)
        if match is None:
            return self.split
        return match["split"]

    @property
    def patterns(self) -> list[str]:
        """The files of the split; empty if the library has to find them."""
        if not self.pattern:
            return []
        return [self.pattern.format(split=self.base_split)]

    @property
    def is_local(self) -> bool:
        """True if the data set is in files of this machine."""
        if exists(Path(self.path)):
            return True
        if self.path not in LOADERS:
            # The files of a data set on the hub are named without "://", too.
            return False
        names = strings_in(self.data_files)
        return bool(names) and not any("://" in name for name in names)

    def is_streamed(self, limit: int) -> bool:
        """Return True if only the first rows are read.

        ``limit``: as from ``row_limit``.
        """
        if "[" in self.split:
            # Streams have no slices; ``hub_records`` cuts ``train[:1000]`` instead.
            return FIRST_ROWS.fullmatch(self.split) is not None
        return limit > 0 or self.streamed

    def is_fetched(self, limit: int) -> bool:
        """Return True if a known name's files are downloaded, and read in the hub's cache."""
        if not self.pattern or self.streamed:
            return False
        is_one_split = ONE_SPLIT.fullmatch(self.split) is not None  # not "train+test"
        return is_one_split and not self.is_streamed(limit)


WIKITEXT2 = Source(
    "Salesforce/wikitext",
    "wikitext-2-raw-v1",
    display="wikitext2",
    pattern="wikitext-2-raw-v1/{split}-*",
)
WIKITEXT103 = Source(
    "Salesforce/wikitext",
    "wikitext-103-raw-v1",
    display="wiki103",
    pattern="wikitext-103-raw-v1/{split}-*",
)
WEB_TEXT_FILES = "plain_text/{split}/*.parquet"
FINEWEB_FILES = "sample/10BT/*.parquet"
SOURCES = {
    "wiki2": WIKITEXT2,
    "wikitext2": WIKITEXT2,
    "wiki103": WIKITEXT103,
    "wikitext103": WIKITEXT103,
    # 1,000 functions in Python, about as much text as WikiText-2's test split; the whole split is
    # 29 MB.
    "code": Source(
        "code-search-net/code_search_net",
        "python",
        "test[:1000]",
        "whole_func_string",
        "CodeSearchNet",
        pattern="python/{split}/*.parquet",
        revision=CONVERTED_BRANCH,
    ),
    "ptb": Source(
        "ptb-text-only/ptb_text_only",
        column="sentence",
        display="PTB",
        pattern="penn_treebank/{split}/*.parquet",
        revision=CONVERTED_BRANCH,
    ),
    "lambada": Source("EleutherAI/lambada_openai", "default", display="lambada"),
    "tinystories": Source(
        "roneneldan/TinyStories",
        split="validation",
        display="TinyStories",
        pattern="data/{split}-*.parquet",
    ),
    # To fetch one file the client would first list all of them, in every language.
    "c4": Source(
        "allenai/c4",
        "en",
        split="validation",
        display="c4",
        pattern="en/c4-{split}.*.json.gz",
        streamed=True,
    ),
    "openwebtext10k": Source(
        "stas/openwebtext-10k",
        split="train",
        display="openwebtext",
        pattern=WEB_TEXT_FILES,
        revision=CONVERTED_BRANCH,
    ),
    "openwebtext": Source(
        "Skylion007/openwebtext",
        split="train[:1000]",
        display="openwebtext",
        pattern=WEB_TEXT_FILES,
        revision=CONVERTED_BRANCH,
    ),
    "fineweb": Source(
        "HuggingFaceFW/fineweb",
        "sample-10BT",
        "train[:1000]",
        display="fineweb",
        pattern=FINEWEB_FILES,
    ),
    "fineweb-edu": Source(
        "HuggingFaceFW/fineweb-edu",
        "sample-10BT",
        "train[:1000]",
        display="fineweb-edu",
        pattern=FINEWEB_FILES,
    ),
}


def source_of(spec: DataSpec) -> Source:
    """Return the known source with every key that the spec sets.

    It has no file pattern if these keys name other files.  InputError for pickles, before they are
    read.
    """
    known_source = SOURCES.get(spec.dataset.lower(), Source(spec.dataset))
    check_no_pickles(spec, spec.dataset_path or known_source.path)
    names_other_files = spec.dataset_path or spec.dataset_name or spec.dataset_data_files
    pattern = known_source.pattern
    is_streamed = known_source.streamed
    if names_other_files:
        pattern = ""
        is_streamed = False
    revision = spec.revision or None
    if revision is None and not spec.dataset_path:
        revision = known_source.revision
    path = spec.locate(spec.dataset_path or known_source.path)
    data_files = map_names(spec.dataset_data_files, spec.locate)
    return Source(
        path=path,
        name=spec.dataset_name or known_source.name,
        split=spec.dataset_split or spec.split or known_source.split,
        column=spec.text_column or known_source.column,
        display=known_source.display,
        data_files=data_files or known_source.data_files,
        pattern=pattern,
        revision=revision,
        streamed=is_streamed,
    )


def check_no_pickles(spec: DataSpec, path: str) -> None:
    """Raise InputError if a file of a data set may be a pickle.

    ``path``: a folder, a hub id, or a loader of ``datasets`` such as "text".
    """
    pickles = []
    for name in strings_in(spec.dataset_data_files):
        if PICKLE_NAME.search(name) and path != "text":  # the loader of plain text reads no pickles
            pickles.append(name)
    if path == PICKLE_LOADER:
        pickles.append(path)
    if pickles:
        why = "may be a pickle, which can run any code; give .jsonl, .parquet or text"
        raise InputError(f"dataset {spec.dataset!r}: {pickles[0]} {why}")


def is_remote(spec: DataSpec) -> bool:
    """Return True if the text may change without a change of a file on this machine.

    It is at a URL then, or on the hub without a commit.
    """
    if spec.path is not None:
        return False
    source = source_of(spec)
    return not source.is_local and COMMIT.fullmatch(source.revision or "") is None


def version(spec: DataSpec) -> str:
    """Return the version of a remote text; "" if unknown.

    It is the entity tags of its URLs, or the commit of its data set.
    """
    from huggingface_hub import HfApi

    source = source_of(spec)
    urls = [name for name in strings_in(source.data_files) if "://" in name]
    try:
        if not urls:
            info = HfApi().dataset_info(source.path, revision=source.revision, timeout=VERSION_S)
            return str(info.sha or "")
        versions = [version_of_url(url) for url in urls]
    except Exception:  # offline, refused, or a scheme that only fsspec knows
        return ""
    if not all(versions):
        return ""
    return json.dumps(versions)


def version_of_url(url: str) -> list[str]:
    """Return the headers of a URL that change with its content; empty without tag and date."""
    with urlopen(Request(url, method="HEAD"), timeout=VERSION_S) as answer:
        tag = answer.headers.get("ETag") or ""
        date = answer.headers.get("Last-Modified") or ""
        size = answer.headers.get("Content-Length") or ""
    if not (tag or date):
        return []  # other content may have the same size
    return [tag, date, size]


def map_names(names: Any, change: Callable[[str], str]) -> Any:
    """Apply ``change`` to each file name in ``data_files`` of load_dataset, in any of its forms."""
    if isinstance(names, str):
        return change(names)
    if isinstance(names, list):
        return [map_names(name, change) for name in names]
    if isinstance(names, dict):
        return {key: map_names(value, change) for key, value in names.items()}
    return names


def row_limit(spec: DataSpec) -> int:
    """Return the maximum number of rows of the data set, 0 for all.

    If both keys are set, ``max_text_rows`` counts.
    """
    rows = spec.max_dataset_rows
    if "max_text_rows" in spec.model_fields_set:
        rows = spec.max_text_rows
    return min(rows or 0, sys.maxsize)  # itertools takes no larger number


@contextmanager
def in_one_line(spec: DataSpec, source: Source) -> Iterator[None]:
    """Turn errors of a data set into an InputError of one line.

    It has the name in the spec, the path, the reason, and a similar name that is known.
    """
    try:
        yield
    except Exception as error:  # datasets, fsspec, pyarrow and the hub client each raise their own
        if isinstance(error, InputError) and str(error).startswith("dataset "):
            raise
        reason = str(error)
        if not isinstance(error, InputError):
            reason = hub.failure_reason(error, "dataset", source.path, source.revision)
        hint = ""
        if spec.dataset.lower() not in SOURCES:
            hint = nearest(spec.dataset, SOURCES)
        reason = reason.removeprefix(f"{source.path}: ")
        raise InputError(
            f"dataset {spec.dataset!r}: cannot load {source.path}: {reason}{hint}"
        ) from None


def fetch(spec: DataSpec, progress: Progress) -> None:
    """Download the files of a known data set if they are read whole; InputError with the reason.

    Called before the files are read, because two progress bars cannot be shown at once.
    """
    source = source_of(spec)
    if spec.path is None and source.is_fetched(row_limit(spec)):
        with (
            in_one_line(spec, source),
            progress.phase(f"fetching {source.path}", unit="bytes") as phase,
        ):
            hub.fetch("dataset", source.path, source.revision, source.patterns, phase)


def hub_records(spec: DataSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name in errors, values) for each row; InputError if the data set cannot be read."""
    source = source_of(spec)
    n_rows = None
    first_rows = FIRST_ROWS.fullmatch(source.split)
    if first_rows:
        n_rows = int(first_rows["rows"])
    with in_one_line(spec, source):
        rows = itertools.islice(split_rows(source, row_limit(spec)), n_rows)
        for number, row in enumerate(rows, 1):
            yield f"dataset {source.path!r}: row {number}", row


def split_rows(source: Source, limit: int) -> Any:
    """Return the rows of a split, as a data set or stream of ``datasets``."""
    library = quiet_library()
    if source.is_fetched(limit):
        folder = hub.fetch("dataset", source.path, source.revision, source.patterns)
        files = {source.base_split: sorted(str(file) for file in folder.glob(source.patterns[0]))}
        builder = "parquet"
        if ".json" in source.pattern:
            builder = "json"
        # Local files can be streamed; only a slice needs the library's own copy of them.
        stream = "[" not in source.split
        return library.load_dataset(builder, data_files=files, split=source.split, streaming=stream)
    if source.is_streamed(limit):
        return ask_library(library.load_dataset, source, split=source.base_split, streaming=True)
    # The library identifies local files by name and time, and files at a URL that has no entity tag
    # by its name alone: it may return cached rows of other files.
    read_again = {}
    if exists(Path(source.path)) or strings_in(source.data_files):
        read_again = {"download_mode": "force_redownload", "verification_mode": "no_checks"}
    return ask_library(library.load_dataset, source, split=source.split, **read_again)


def ask_library(call: Callable[..., Any], source: Source, **keys: Any) -> Any:
    """Call ``load_dataset`` or its builder, with the library's cache if the hub is not reached."""
    name = source.name
    files = source.data_files
    if source.pattern:
        # The pattern names the files of the configuration.
        name = None
        files = {source.base_split: source.patterns}
    arguments = {"name": name, "data_files": files, "revision": source.revision, **keys}
    try:
        check_path(source)
        return call(source.path, **arguments)
    except HubUnreachableError as error:
        try:
            with hub.offline():
                return call(source.path, **arguments)
        except Exception:  # the library raises different errors in each of its steps
            reason = str(error).removeprefix(f"{source.path}: ")
            raise InputError(f"not in the local cache, and {reason}") from None
    except FileNotFoundError:
        if not source.pattern:
            raise
        raise InputError(f"no file {source.patterns[0]} on the hub") from None


def check_path(source: Source) -> None:
    """Raise InputError unless a data set has a loader's name, or is in a folder or on the hub."""
    from datasets import packaged_modules

    path = Path(source.path)
    if path.is_file():
        raise InputError('is a file; give "dataset": "text" and the file as "path"')
    if path.exists() or source.path in packaged_modules._PACKAGED_DATASETS_MODULES:
        return
    if "/" not in source.path:
        raise InputError("unknown name; data sets of the hub are named owner/name")
    # Asked once: the library would try again for minutes if the hub does not answer.
    hub.look_up("dataset", source.path, source.revision, files=False)


def would_fetch(spec: DataSpec) -> str:
    """Describe the download of a data set of the hub, e.g. ``Salesforce/wikitext, 0.7 MB to
    download``.

    Downloads no data (``datasets`` reads the data set's card).  InputError with the reason if the
    data set, its configuration or its split does not exist.
    """
    source = source_of(spec)
    if source.is_fetched(row_limit(spec)):
        with in_one_line(spec, source):
            size = hub.would_fetch(
                source.path, source.revision, source.patterns, repo_type="dataset"
            )
        return f"{source.path}, {size}"
    processes.run_in_subprocess(
        check_split, f"asking for {source.path}", spec=spec_files.as_json(spec)
    )
    words = (source.path, source.name, source.split)
    return ", ".join(word for word in words if word)


def check_split(spec: Mapping[str, Any]) -> None:
    """Raise InputError unless ``datasets`` finds the data set, its configuration and its split.

    ``spec``: as JSON.
    """
    data = spec_files.from_json(spec)
    source = source_of(data)
    with in_one_line(data, source):
        builder = ask_library(quiet_library().load_dataset_builder, source)
        splits = [str(name) for name in builder.config.data_files or builder.info.splits or ()]
        if splits and source.base_split not in splits:
            raise InputError(f"no split {source.base_split!r}; there are: {', '.join(splits)}")


def quiet_library() -> Any:
    """Import ``datasets`` without progress bars, warnings and requests to the data set viewer.

    ``datasets`` requests a data set's features from the viewer, for up to 100 s; the files contain
    them as well.
    """
    import datasets
    from huggingface_hub import utils

    datasets.disable_progress_bars()
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    datasets.utils.logging.set_verbosity_error()
    datasets.config.USE_PARQUET_EXPORT = False
    return datasets

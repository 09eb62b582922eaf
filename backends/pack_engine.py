"""A reference pack as a model: its logits are recomputed from the stored states and head.

With ``reference: true``, other models are compared with the pack, and its states are read from its
own files.  Scoring a pack checks it: the logits of every scored token must give the scores that the
reference's own engine computed, up to rounding.  Nothing else about the model is known or needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import hub
from .base import (
    Capabilities,
    Layer,
    ModelFacts,
    ModelFiles,
    PlannedModel,
    ScoreRequest,
    Storage,
    TokenScores,
    Window,
)
from .common.errors import InputError, ModelError
from .layers.groups import recorded_groups
from .logits_engine import PIECE_ELEMENTS, LogitsEngine
from .reference import pack_files, store
from .reference.comparison import load_head
from .reference.head import head_logits, largest_finite, spacing

if TYPE_CHECKING:
    import torch


class PackFiles(ModelFiles):
    """A pack before it loads: a folder, or a data set on the hub."""

    is_store = True

    @property
    def folder(self) -> Path:
        """The folder of the pack; InputError if it is not on this machine."""
        return pack_files.resolve(self.planned.model_dir, self.planned.revision, download=False)

    @property
    def is_remote(self) -> bool:
        return hub.is_hub_id(self.planned.model_dir)

    def fetch(self, watch: hub.Watch = hub.SILENT) -> PlannedModel:
        folder = pack_files.resolve(self.planned.model_dir, self.planned.revision, watch)
        return self.planned.updated(model_dir=str(folder), revision=None)

    def would_fetch(self) -> str:
        return hub.would_fetch(
            self.planned.model_dir, self.planned.revision, pack_files.PATTERNS, repo_type="dataset"
        )

    def cached(self) -> PlannedModel | None:
        try:
            return self.planned.updated(model_dir=str(self.folder), revision=None)
        except InputError:
            return None

    def facts(self) -> ModelFacts:
        head = store.read_manifest(self.folder / pack_files.STATES).head
        return ModelFacts(vocab_size=head.vocab_size, dtype=head.dtype)

    def stamp(self) -> str:
        content = pack_files.read(self.folder).model_dump_json()
        return hashlib.sha256(content.encode()).hexdigest()

    def storage(self) -> Storage:
        sizes = pack_files.read(self.folder).storage
        return Storage(**sizes.model_dump())

    def finished_store(self) -> Path:
        return self.folder / pack_files.STATES


class PackEngine(LogitsEngine):
    """One reference pack."""

    capabilities = Capabilities(
        load_fns=("pack",),
        fwd_fn="pack",
        packages=("torch",),
        install="pip install torch",
        summary="a reference pack: KL divergence without the reference's model",
        marker=pack_files.PACK_MANIFEST,
    )
    files = PackFiles

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        super().check(model)
        files = cls.files(model)
        if not files.is_remote:
            folder = pack_files.resolve(model.model_dir)
            manifest = pack_files.verified(folder)
            # For its InputError: the groups of layers are from an unknown source too.
            recorded_groups(manifest.provenance, str(folder / pack_files.PACK_MANIFEST))

    def load(self) -> None:
        import torch

        folder = Path(self.planned.model_dir)
        # ``check`` has verified every byte.
        self.manifest = pack_files.read(folder)
        self.store = store.Reader(folder / pack_files.STATES)
        self.engine_scores = pack_files.scores_of(folder)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.largest_logit = 0.0
        if self.store.contents == "states":
            vocabulary = (0, self.store.head.vocab_size)
            self.model = load_head(self.store, vocabulary, self.device)

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        import torch

        step = max(PIECE_ELEMENTS // self.store.head.vocab_size, 1)
        n_stored = self.store.n_rows(window.digest)
        if n_stored != window.n_scored:
            raise ModelError(
                f"window {window.index}: the pack has {n_stored} positions, "
                f"the window {window.n_scored}"
            )
        n_done = 0
        position = 0
        for first, last in window.spans:
            # Token t is predicted at position t - 1.  Positions that predict no scored token are
            # not stored.
            yield torch.empty(first - 1 - position, 0)
            for begin in range(first - 1, last - 1, step):
                count = min(step, last - 1 - begin)
                yield self.stored_logits(window, n_done, n_done + count)
                n_done += count
            position = last - 1
        yield torch.empty(len(window.token_ids) - position, 0)

    def stored_logits(self, window: Window, begin: int, end: int) -> torch.Tensor:
        """Return the logits [end - begin, V] of scored positions of a window."""
        rows = self.store.window(window.digest, begin, end).to(self.device)
        if self.model is not None:
            rows = head_logits(self.store.head, rows, self.model.weight, self.model.bias)
        self.largest_logit = max(self.largest_logit, largest_finite(rows))
        return rows

    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Yield the scores of every window.

        ModelError if they are not those that the reference's engine computed.
        """
        unknown = [window.index for window in windows if window.digest not in self.engine_scores]
        if unknown:
            count = f"{len(unknown):,} of {len(windows):,} windows"
            raise ModelError(
                f"{self.planned.model_dir}: lacks {count}, window {unknown[0]} among them"
            )
        for window, scores in zip(windows, super().score(windows, request), strict=True):
            self.compare(scores, self.engine_scores[window.digest])
            yield scores

    def compare(
        self, scores: TokenScores, engine_scores: Mapping[str, NDArray[np.float32]]
    ) -> None:
        """ModelError unless a window's scores are its engine's, up to rounding of the logits.

        A logit may differ by four spacings of its dtype, as when a store is recorded.  The average
        may be a sixteenth of that, since few roundings are as large.
        """
        limit = 4 * spacing(self.store.head.dtype) * self.largest_logit
        for name in pack_files.ENGINE_SCORES:
            rescored = getattr(scores, name)
            stored = engine_scores[name]
            # The difference of two infinite scores is NaN, also if they are equal.
            is_same = (rescored == stored) | (np.isnan(rescored) & np.isnan(stored))
            with np.errstate(invalid="ignore"):
                deviation = np.where(is_same, 0.0, np.abs(rescored - stored))
            # NaN is checked for itself: comparisons with it are False.
            if (
                np.nanmax(deviation, initial=0.0) > limit
                or np.isnan(deviation).any()
                or np.mean(deviation) > limit / 16
            ):
                token = int(np.argmax(np.nan_to_num(deviation, nan=np.inf)))
                raise ModelError(
                    f"{self.planned.model_dir}: the stored states do not give what "
                    f"{self.manifest.engine} computed: window {scores.window}, scored token "
                    f"{token}: {name} {rescored[token]:.5g} instead of {stored[token]:.5g}"
                )

    def layers(self) -> tuple[Layer, ...]:
        """Return how the layers ran where the pack was recorded."""
        return recorded_groups(self.manifest.provenance, pack_files.PACK_MANIFEST)

    def provenance(self) -> dict[str, Any]:
        manifest = self.manifest
        origin = f"recorded with {manifest.summary}"
        if manifest.floor_kld is not None:
            origin += f"; its noise floor there: KLD {manifest.floor_kld:.5g}"
        note = (
            f"{origin}. The KLD of a row of another engine includes the difference between the "
            "engines; a row with the unquantized model in that engine measures it"
        )
        provenance = {}
        for key, value in manifest.provenance.items():
            if key in ("attention", "kv_cache"):
                provenance[key] = value
        provenance["device"] = str(self.device)
        provenance["dtype"] = self.store.head.dtype
        provenance["recorded"] = manifest.provenance
        provenance["notes"] = [note]
        return provenance

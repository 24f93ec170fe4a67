"""Dense retrieval: passages by the nearness of their embeddings, computed once, and compared exactly with a query's.

    <cache>/dense/<index>-<encoder>.npy    float32, a row of length 1 for each passage of the BM25 index, in its order

Both names are hashes of contents, so that another corpus, cut or encoder is another file. It is written beside its
place and renamed into it.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.errors import ExitCode, UserError, not_installed
from trainwright.evaluate.retrieval.passages import Passage, PassageFile
from trainwright.launch.run_output import tell
from trainwright.model_folder import CONFIG, read_model_config, require_whole
from trainwright.runs.kill_domain import die_with_launcher

if TYPE_CHECKING:
    import numpy as np

FORMAT = 1
AT_ONCE = 2048
"""Passages that are embedded between two writes."""
BLOCK_PASSAGES = 16_384
"""Rows that are compared at a time: 64 MiB of scores for 1,000 queries."""
DECIMALS = 5
"""Of a score. Digits beyond hang on which texts shared a batch; of equal scores the earlier passage comes first."""
ENCODER_FILES = ("*.json", "*.txt", "*.model", "*.safetensors")
OTHER_BACKENDS = ("onnx/*", "openvino/*")


class PassageEncoder:
    """A sentence-transformers model: safetensors only, and no code that came with it."""

    def __init__(self, folder: Path, *, device: str | None = None) -> None:
        """Load it; `device` None takes a GPU where there is one. Raises UserError (exit code 4) if it cannot be."""
        from sentence_transformers import SentenceTransformer

        try:
            self._model = SentenceTransformer(
                str(folder),
                device=device,
                trust_remote_code=False,
                local_files_only=True,
                model_kwargs={"use_safetensors": True},
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise _unusable(str(folder), error) from error

    def queries(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        """Return an embedding of length 1 for each query, float32; with the encoder's own prompt for queries."""
        return self._rows(self._model.encode_query, texts)

    def passages(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        """Return an embedding of length 1 for each passage, float32; with the encoder's own prompt for documents."""
        return self._rows(self._model.encode_document, texts)

    def _rows(self, encode: Any, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        import numpy as np

        rows = encode(list(texts), normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True)
        return np.ascontiguousarray(rows, dtype=np.float32)


class DenseIndex:
    """Embeddings of the passages on disk, with what embeds a query."""

    def __init__(self, passages: PassageFile, embeddings: Path, encoder: PassageEncoder) -> None:
        import numpy as np

        self._passages, self._encoder = passages, encoder
        self._rows = np.load(embeddings, mmap_mode="r")

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return the `k` nearest passages of each query, the nearest first; of equal ones the earlier in the corpus."""
        import numpy as np

        vectors = self._encoder.queries(queries)
        best = [(np.empty(0, np.float32), np.empty(0, np.int64)) for _ in queries]
        for start in range(0, len(self._rows), BLOCK_PASSAGES):
            block = self._rows[start : start + BLOCK_PASSAGES]
            places = np.arange(start, start + len(block))
            scores = np.round(vectors @ block.T, DECIMALS)
            best = [
                _best(np.concatenate([kept, row]), np.concatenate([where, places]), k)
                for (kept, where), row in zip(best, scores, strict=True)
            ]
        return [[self._passages[place] for place in where.tolist()] for _, where in best]


def _best(
    scores: np.ndarray[Any, Any], places: np.ndarray[Any, Any], k: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the `k` highest scores and their places, the highest first; of equal ones the first given."""
    if len(scores) > k:
        least = scores.copy()
        least.partition(len(scores) - k)
        among = (scores >= least[len(scores) - k]).nonzero()[0]
        scores, places = scores[among], places[among]
    order = (-scores).argsort(kind="stable")[:k]
    return scores[order], places[order]


def find_encoder(name: str) -> Path:
    """Return the folder of an encoder: a folder as it is, or the snapshot of a hub name.

    Raises:
        UserError: sentence-transformers is missing, there is no such encoder, or its weights are pickled (exit code 4).
    """
    if find_spec("sentence_transformers") is None:
        raise not_installed(
            "dense retrieval", "sentence-transformers", extra="dense", instead="retrieve by words: method: bm25"
        )
    folder = Path(name).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            snapshot = snapshot_download(name, allow_patterns=list(ENCODER_FILES), ignore_patterns=list(OTHER_BACKENDS))
        except (OSError, ValueError) as error:
            raise _unusable(name, error) from error
        folder = Path(snapshot)
    if not any((folder / name).is_file() for name in ("modules.json", "config.json")):
        raise _unusable(name, FileNotFoundError("it has neither modules.json nor config.json"))
    for pickled in folder.rglob("pytorch_model*.bin"):
        if not any(pickled.parent.glob("*.safetensors")):
            raise UserError(
                f"the encoder {name} has only pickled weights, {pickled.name}, which are never loaded",
                hints=["save it again with sentence-transformers, which writes safetensors", "or take another encoder"],
                exit_code=ExitCode.MISSING,
            )
    for config in sorted(folder.rglob(CONFIG)):
        read_model_config(config)
        require_whole(config.parent)
    return folder.resolve()


def open_embeddings(index: Path, encoder: Path, cache: Path, environment: Mapping[str, str]) -> Path:
    """Return the embeddings of the passages of a BM25 index, from the cache if they are there, else computed.

    They are computed in a process of its own, which gives its GPU back; `environment` says which it sees.

    Raises:
        UserError: the encoder cannot be loaded, or its process died.
    """
    path = cache / "dense" / f"{index.name}-{_key(encoder)}.npy"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".unfinished-{os.urandom(4).hex()}.npy")
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=spawn, initializer=_begin, initargs=(environment,)) as process:
            process.submit(_embed, index, encoder, unfinished).result()
        unfinished.rename(path)
    except BrokenProcessPool as error:
        raise UserError(
            "the process that embeds the passages died",
            hints=["look for a lack of memory: a smaller encoder, or shorter passages"],
            exit_code=ExitCode.FAILED,
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _begin(environment: Mapping[str, str]) -> None:
    die_with_launcher()
    os.environ.update({"HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment})


def _embed(index: Path, encoder: Path, unfinished: Path) -> None:
    """Write the embeddings front to back: a full disk is then an error, where a map would end the process."""
    import numpy as np

    passages, model = PassageFile(index), PassageEncoder(encoder)
    total = len(passages)
    tell(f"embedding {total:,} passages with {encoder.name}")
    with unfinished.open("wb") as file:
        for start in range(0, total, AT_ONCE):
            places = range(start, min(start + AT_ONCE, total))
            rows = model.passages([passages[place].searched for place in places])
            if not start:
                header = {"descr": "<f4", "fortran_order": False, "shape": (total, rows.shape[1])}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(rows.data)
            if (places.stop * 10) // total > (start * 10) // total:
                tell(f"embedded {places.stop:,}/{total:,}")


def _key(encoder: Path) -> str:
    """Return the hash of all that an embedding follows from but its text."""
    digest = hashlib.sha256(f"{FORMAT}\0{metadata.version('sentence-transformers')}\n".encode())
    files = {path for pattern in ENCODER_FILES for path in encoder.rglob(pattern) if path.is_file()}
    for path in sorted(files):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(encoder).as_posix()}\0{content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _unusable(name: str, error: Exception) -> UserError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(
        f"the encoder cannot be loaded from {name}: {first}",
        hints=[
            "name a folder that sentence-transformers saved (pickled weights are never loaded)",
            "an encoder of the hub must be in the cache (HF_HUB_CACHE) when there is no network",
        ],
        exit_code=ExitCode.MISSING,
    )

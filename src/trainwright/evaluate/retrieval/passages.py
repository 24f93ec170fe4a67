"""Passages: a corpus of text files, or of JSON Lines, cut into pieces that fit into a prompt."""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from trainwright.errors import ExitCode, UserError

TEXT_SUFFIXES = (".txt", ".md", ".rst")
CHUNK_WORDS = 200
OVERLAP_WORDS = 40


@dataclass(frozen=True)
class Passage:
    """A piece of a document."""

    id: str
    """Of the document, with the number of the piece where there are several."""
    document: str
    text: str
    source: str
    """File and line, for whoever wants to look it up."""
    title: str = ""
    """Of the document; searched like the text."""

    @property
    def searched(self) -> str:
        """The words by which it is found."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True)
class Chunking:
    """How documents are cut, in words, each piece beginning `overlap_words` before the last one's end.

    Raises:
        UserError: no piece would go forward.
    """

    words: int = CHUNK_WORDS
    overlap_words: int = OVERLAP_WORDS

    def __post_init__(self) -> None:
        if not 0 <= self.overlap_words < self.words:
            raise UserError(
                f"passages of {self.words} words cannot overlap by {self.overlap_words}",
                hints=["make the overlap 0 or more, and less than the words of a passage"],
            )


def corpus_files(corpus: Path) -> list[Path]:
    """Return the files of a corpus in a fixed order: a jsonl file itself, or all text and jsonl files of a folder.

    Raises:
        UserError: there are none.
    """
    suffixes = (*TEXT_SUFFIXES, ".jsonl")
    if corpus.is_file():
        files = [corpus] if corpus.suffix.lower() in suffixes else []
    else:
        files = sorted(path for path in corpus.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    if not files:
        raise UserError(
            f"{corpus} holds no passages",
            hints=[f"name a folder of {', '.join(TEXT_SUFFIXES)} files, or a .jsonl file of rows with a text"],
            exit_code=ExitCode.MISSING,
        )
    return files


def read_passages(corpus: Path, chunking: Chunking) -> Iterator[Passage]:
    """Yield the passages of a corpus, in order.

    Raises:
        UserError: a file cannot be read, or a row has no text; the line is named.
    """
    root = corpus if corpus.is_dir() else corpus.parent
    for path in corpus_files(corpus):
        name = path.relative_to(root).as_posix()
        try:
            if path.suffix.lower() == ".jsonl":
                yield from _of_rows(path, name, chunking)
            else:
                yield from _pieces(name, path.read_text(encoding="utf-8-sig"), name, chunking)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}", exit_code=ExitCode.STORAGE) from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: byte {error.start} is none of it") from error


def _of_rows(path: Path, name: str, chunking: Chunking) -> Iterator[Passage]:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{name}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number}: not JSON: {error}") from error
            text = row.get("text", row.get("contents")) if isinstance(row, dict) else row
            if not isinstance(text, str):
                raise UserError(f"{path}:{number}: no text", hints=['write {"id": "...", "text": "..."}'])
            document = str(row.get("id", where)) if isinstance(row, dict) else where
            title = row.get("title") if isinstance(row, dict) else None
            yield from _pieces(document, text, where, chunking, title=str(title or ""))


def _pieces(document: str, text: str, source: str, chunking: Chunking, *, title: str = "") -> Iterator[Passage]:
    words = text.split()
    if len(words) <= chunking.words:
        if words:
            yield Passage(document, document, text.strip(), source, title)
        return
    stride = chunking.words - chunking.overlap_words
    for number, start in enumerate(range(0, len(words) - chunking.overlap_words, stride), 1):
        piece = " ".join(words[start : start + chunking.words])
        yield Passage(f"{document}#{number}", document, piece, f"{source}#{number}", title)


class PassageWriter:
    """Writes passages one after the other, with the offset of each, so that any can be read without the others."""

    def __init__(self, folder: Path) -> None:
        self._lines = (folder / "passages.jsonl").open("wb")
        self._offsets_path = folder / "passages.offsets"
        self._offsets = array("Q", [0])

    def __enter__(self) -> PassageWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        self._offsets_path.write_bytes(self._offsets.tobytes())

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def write(self, passage: Passage) -> None:
        """Add a passage."""
        line = json.dumps(asdict(passage), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        self._offsets.append(self._offsets[-1] + self._lines.write(line))


class PassageFile:
    """Written passages, mapped into memory and not read."""

    def __init__(self, folder: Path) -> None:
        with (folder / "passages.jsonl").open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._offsets = array("Q")
        self._offsets.frombytes((folder / "passages.offsets").read_bytes())

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Passage:
        line = self._lines[self._offsets[index] : self._offsets[index + 1]]
        return Passage(**json.loads(line.decode("utf-8", "surrogatepass")))

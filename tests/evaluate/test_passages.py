"""Corpora cut into passages, each with its source, and read back without reading the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainwright.errors import UserError
from trainwright.evaluate.retrieval.passages import Chunking, PassageFile, PassageWriter, read_passages


def test_a_folder_of_texts_is_cut_with_an_overlap(tmp_path: Path) -> None:
    """Issue 6, retrieval: every word is in a passage, neighbours share words, sources tell file and piece."""
    words = [f"word{number}" for number in range(95)]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "long.txt").write_text("\n".join(words))
    (tmp_path / "a.md").write_text("# Short\n\ntext")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    passages = list(read_passages(tmp_path, Chunking(words=40, overlap_words=10)))
    assert [passage.source for passage in passages] == ["a.md", *(f"sub/long.txt#{piece}" for piece in (1, 2, 3))]
    assert passages[0].text == "# Short\n\ntext"
    pieces = [passage.text.split() for passage in passages[1:]]
    assert pieces == [words[0:40], words[30:70], words[60:95]]
    assert {passage.document for passage in passages[1:]} == {"sub/long.txt"}


def test_rows_of_a_jsonl_keep_their_ids(tmp_path: Path) -> None:
    """Issue 6, retrieval: ids are what gold passages name; the line is the source."""
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"id": "p7", "title": "Radio", "text": "An O-RU radiates."}, {"text": "No id."}, "Bare text."]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    passages = list(read_passages(corpus, Chunking()))
    assert [(passage.id, passage.source) for passage in passages] == [
        ("p7", "corpus.jsonl:1"),
        ("corpus.jsonl:2", "corpus.jsonl:2"),
        ("corpus.jsonl:3", "corpus.jsonl:3"),
    ]
    assert passages[0].searched == "Radio\nAn O-RU radiates." and passages[0].text == "An O-RU radiates."


def test_what_is_no_corpus_is_refused_with_the_line(tmp_path: Path) -> None:
    """Issue 6, retrieval."""
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"body": "what?"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:2: no text"):
        list(read_passages(tmp_path / "bad.jsonl", Chunking()))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no passages"):
        list(read_passages(tmp_path / "empty", Chunking()))
    with pytest.raises(UserError, match="cannot overlap"):
        Chunking(words=10, overlap_words=10)


def test_any_passage_is_read_back_alone(tmp_path: Path) -> None:
    """Issue 6, retrieval: by offset, in whatever alphabet."""
    (tmp_path / "corpus").mkdir()
    for number in range(50):
        (tmp_path / "corpus" / f"{number:02}.txt").write_text("信号\n" * number + f"Nummer {number}", encoding="utf-8")
    passages = list(read_passages(tmp_path / "corpus", Chunking()))
    with PassageWriter(tmp_path) as writer:
        for passage in passages:
            writer.write(passage)
    stored = PassageFile(tmp_path)
    assert len(stored) == 50
    assert [stored[number] for number in (49, 0, 17)] == [passages[number] for number in (49, 0, 17)]

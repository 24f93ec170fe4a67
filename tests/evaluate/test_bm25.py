"""BM25: the ranking that its formula gives, the same every time, from an index that is built once."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.retrieval.bm25 import K1, B, Coverage, open_index
from trainwright.evaluate.retrieval.passages import Chunking

NAMES = ["mara", "ivo", "lena", "otto", "nils", "rosa", "emil", "hugo"]
VERBS = ["paints", "sells", "repairs", "collects", "draws", "cleans"]
THINGS = ["boats", "bread", "clocks", "apples", "chairs", "lamps", "maps", "coins"]


def corpus_of(tmp_path: Path, texts: list[str], name: str = "corpus.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps({"id": f"p{number}", "text": text}) + "\n" for number, text in enumerate(texts)))
    return path


def facts(count: int) -> list[str]:
    chance = random.Random(3)
    return [
        " ".join(f"{chance.choice(NAMES)} {chance.choice(VERBS)} {chance.choice(THINGS)}." for _ in range(1 + n % 5))
        for n in range(count)
    ]


def by_formula(texts: list[str], query: str) -> list[tuple[int, float]]:
    """Return passages by score, then place: Lucene's BM25 as Kamphuis et al., ECIR 2020, write it."""
    documents = [Counter(re.findall(r"\w\w+", text.lower())) for text in texts]
    mean = sum(document.total() for document in documents) / len(documents)
    scores = [0.0] * len(texts)
    for word in re.findall(r"\w\w+", query.lower()):
        having = sum(word in document for document in documents)
        idf = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for number, document in enumerate(documents):
            length = K1 * (1 - B + B * document.total() / mean)
            scores[number] += idf * document[word] / (document[word] + length)
    return sorted(
        ((n, score) for n, score in enumerate(scores) if score), key=lambda item: (-round(item[1], 5), item[0])
    )


def test_passages_are_ranked_as_the_formula_says(tmp_path: Path) -> None:
    """Issue 6, retrieval, T-19: confusable passages, scores to four digits, ties in the order of the corpus."""
    texts = facts(400)
    index = open_index(corpus_of(tmp_path, texts), tmp_path / "cache")
    assert len(index) == 400
    for query in ("What does Mara paint? mara paints", "who repairs clocks", "otto"):
        found = index.search(query, 12)
        expected = by_formula(texts, query)[:12]
        assert [hit.score for hit in found] == pytest.approx([score for _, score in expected], rel=1e-4)
        assert [hit.passage.id for hit in found] == [f"p{number}" for number, _ in expected]
        assert [hit.passage.text for hit in found] == [texts[number] for number, _ in expected]
        assert found[0].passage.source == f"corpus.jsonl:{expected[0][0] + 1}"


def test_the_next_passages_come_after_the_first(tmp_path: Path) -> None:
    """Issue 6, retrieval: "retrieve" fetches the next one; nothing comes twice, and the end is the end."""
    index = open_index(corpus_of(tmp_path, facts(60)), tmp_path / "cache")
    every = index.search("mara paints boats", 60)
    one_by_one = [hit for skip in range(len(every)) for hit in index.search("mara paints boats", 1, skip=skip)]
    assert one_by_one == every
    assert index.search("mara paints boats", 5, skip=len(every)) == []


@pytest.mark.parametrize("query", ["", "the of and", "xylophone"])
def test_a_query_without_a_known_word_finds_nothing(query: str, tmp_path: Path) -> None:
    """T-19: a passage that shares no word is no find."""
    assert open_index(corpus_of(tmp_path, facts(10)), tmp_path / "cache").search(query, 3) == []


def test_an_index_is_built_once_for_the_same_text(tmp_path: Path) -> None:
    """Issue 6, retrieval: keyed by content: another place finds it, another word, name or cut does not."""
    cache = tmp_path / "cache"

    def built() -> set[str]:
        return {path.name for path in (cache / "bm25").iterdir()}

    corpus = corpus_of(tmp_path, facts(30))
    open_index(corpus, cache)
    [first] = built()
    marker = cache / "bm25" / first / "meta.json"
    before = marker.stat().st_mtime_ns
    (tmp_path / "elsewhere").mkdir()
    open_index(corpus_of(tmp_path / "elsewhere", facts(30)), cache)
    assert built() == {first} and marker.stat().st_mtime_ns == before
    open_index(corpus, cache, chunking=Chunking(words=5, overlap_words=1))
    corpus.write_text(corpus.read_text().replace("mara", "maria", 1))
    assert open_index(corpus, cache).search("maria", 1)[0].passage.text.count("maria") == 1
    assert len(built()) == 3


def test_two_processes_that_build_the_same_index_end_with_one(tmp_path: Path) -> None:
    """Issue 6, retrieval: workers start at once; the index is whole, and nothing half-built is left."""
    corpus = corpus_of(tmp_path, facts(500))
    script = (
        "import sys; from pathlib import Path\n"
        "from trainwright.evaluate.retrieval.bm25 import open_index\n"
        "print([hit.passage.id for hit in open_index(Path(sys.argv[1]), Path(sys.argv[2])).search('mara sells', 5)])\n"
    )
    command = [sys.executable, "-c", script, str(corpus), str(tmp_path / "cache")]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [worker.communicate()[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert said[0] == said[1] and "p" in said[0]
    assert len(list((tmp_path / "cache" / "bm25").iterdir())) == 1


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """Issue 6, retrieval: the next try starts clean."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "fine"}\n{"nothing": 1}\n')
    with pytest.raises(UserError, match="no text"):
        open_index(corpus, tmp_path / "cache")
    assert list((tmp_path / "cache" / "bm25").iterdir()) == []
    corpus.write_text('{"text": "? !"}\n')
    with pytest.raises(UserError, match="no words"):
        open_index(corpus, tmp_path / "cache")


def test_without_bm25s_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 6, retrieval: an extra, not a core dependency."""
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(UserError, match="needs bm25s") as refusal:
        open_index(corpus_of(tmp_path, facts(3)), tmp_path / "cache")
    assert refusal.value.exit_code is ExitCode.MISSING
    assert "trainwright[eval]" in refusal.value.hints[0]


def test_a_title_is_searched_and_is_no_part_of_the_text(tmp_path: Path) -> None:
    """Issue 6, retrieval: the pages of a document are found by its name, which they do not repeat."""
    corpus = tmp_path / "pages.jsonl"
    rows = [{"title": title, "text": text} for title, text in (("Obertal", "Otto sells bread."), ("Aubach", "Otto."))]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (hit,) = open_index(corpus, tmp_path / "cache").search("Obertal", 5)
    assert (hit.passage.title, hit.passage.text) == ("Obertal", "Otto sells bread.")


def test_passages_cover_a_question_by_the_words_that_the_corpus_has(tmp_path: Path) -> None:
    """T-19: whether a retrieval brought what was looked for is observed; words that no passage has do not count."""
    index = open_index(corpus_of(tmp_path, ["otto sells bread.", "mara paints boats.", "otto draws maps."]), tmp_path)
    covers = Coverage(index)
    bread, boats, maps = index.passages[0], index.passages[1], index.passages[2]
    question = Question("q", "What do we know of Otto and of boats in Lisbon?", (), ("?",))
    assert not covers(question, [])
    assert not covers(question, [boats])
    assert not covers(question, [bread, maps])
    assert covers(question, [maps, boats])
    assert not covers(Question("q", "Where is Lisbon?", (), ("?",)), [bread, boats, maps])

"""Dense and hybrid retrieval: exactly the nearest passages, embedded once, and fused by rank as the formula says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from evaluations import results, run, write_benchmark

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.eval_config import load_evaluation
from trainwright.evaluate.retrieval import dense
from trainwright.evaluate.retrieval.passages import Chunking, Passage
from trainwright.evaluate.retrieval.retriever import PassageQuery, open_retriever, prepare, reciprocal_rank_fusion

WORDS = ["mara", "ivo", "lena", "otto", "paints", "sells", "repairs", "boats", "bread", "clocks", "apples", "chairs"]
TEXTS = [
    f"{WORDS[number % 4]} {WORDS[4 + number * 5 % 3]} {WORDS[7 + number * 7 % 5]} {WORDS[number * 11 % 12]}"
    for number in range(70)
]
QUERIES = ["who paints boats", "otto sells", "what does lena repair, and which clocks"]


def save_encoder(folder: Path) -> Path:
    """Write a random BERT of a few thousand weights, with a prompt for queries, as sentence-transformers does."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "ask", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = folder.with_name(f"{folder.name}-bert")
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **shape)).save_pretrained(bert)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(bert)
    SentenceTransformer(modules=[Transformer(str(bert)), Pooling(32)], prompts={"query": "ask "}).save(str(folder))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{number}", "text": text}) + "\n" for number, text in enumerate(TEXTS)))
    return path


@pytest.fixture(scope="module")
def prepared(encoder: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return prepare("dense", corpus, Chunking(), tmp_path_factory.mktemp("cache"), encoder=str(encoder))


def nearest(encoder: Path) -> list[list[str]]:
    """Return the ids of all passages for each query, by cosines computed here; of equal ones the earlier first."""
    import numpy as np
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(encoder), device="cpu")
    rows = np.stack([model.encode(text) for text in TEXTS]).astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rankings = []
    for query in QUERIES:
        asked = model.encode(f"ask {query}").astype(np.float64)
        cosines = np.round(rows @ asked / np.linalg.norm(asked), dense.DECIMALS)
        rankings.append([f"p{place}" for place in sorted(range(len(TEXTS)), key=lambda at: (-cosines[at], at))])
    return rankings


def test_the_nearest_passages_are_found_exactly(
    prepared: dict[str, Any], encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 6, retrieval: as the cosines of all passages say, over several blocks, with the prompt for queries."""
    monkeypatch.setattr(dense, "BLOCK_PASSAGES", 16)
    expected = nearest(encoder)
    found = open_retriever(prepared).search([PassageQuery(query, 9) for query in QUERIES])
    assert [[passage.id for passage in ranking] for ranking in found] == [ranking[:9] for ranking in expected]
    assert len({tuple(ranking[:9]) for ranking in expected}) == len(QUERIES)
    further = open_retriever(prepared).search([PassageQuery(QUERIES[0], 4, frozenset(expected[0][:5]))])
    assert [passage.id for passage in further[0]] == expected[0][5:9]


def test_hybrid_ranks_by_the_sum_of_reciprocal_ranks(encoder: Path, corpus: Path, prepared: dict[str, Any]) -> None:
    """Issue 6, retrieval: the same passages as the two rankings, fused by hand with 1 / (60 + rank)."""
    cache = Path(prepared["embeddings"]).parents[1]
    hybrid = open_retriever(prepare("hybrid", corpus, Chunking(), cache, encoder=str(encoder)))
    by_words = open_retriever(prepare("bm25", corpus, Chunking(), cache))
    for query, ranking in zip(QUERIES, nearest(encoder), strict=True):
        [worded] = by_words.search([PassageQuery(query, len(TEXTS))])
        sums = {name: 1 / (60 + rank) for rank, name in enumerate(ranking, 1)}
        for rank, passage in enumerate(worded, 1):
            sums[passage.id] += 1 / (60 + rank)
        [found] = hybrid.search([PassageQuery(query, 10)])
        assert [sums[passage.id] for passage in found] == pytest.approx(sorted(sums.values(), reverse=True)[:10])
        assert {passage.id for passage in found} != set(ranking[:10])


def test_reciprocal_ranks_by_hand() -> None:
    """Cormack et al. 2009: a, in both rankings, before b, which is first in one; of equal ones the first met."""
    a, b, c, d = (Passage(name, name, name, name) for name in "abcd")
    assert reciprocal_rank_fusion([[b, a, c], [d, a]]) == [a, b, d, c]


def test_passages_are_embedded_once(prepared: dict[str, Any], encoder: Path, corpus: Path) -> None:
    """Issue 6, retrieval: a second preparation takes the file of the first, which is named by its index's hash."""
    embeddings = Path(prepared["embeddings"])
    before = embeddings.stat().st_mtime_ns
    cache = embeddings.parents[1]
    for method in ("dense", "hybrid"):
        again = prepare(method, corpus, Chunking(), cache, encoder=str(encoder))
        assert again["embeddings"] == prepared["embeddings"]
    assert embeddings.stat().st_mtime_ns == before
    assert list(embeddings.parent.iterdir()) == [embeddings]
    assert embeddings.name.startswith(f"{Path(prepared['folder']).name}-")


def test_an_evaluation_retrieves_by_both(prepared: dict[str, Any], encoder: Path, corpus: Path, tmp_path: Path) -> None:
    """Issue 6, retrieval: the command takes what is embedded, its worker searches, the results say with what."""
    write_benchmark(tmp_path, 5)
    cache = Path(prepared["embeddings"]).parents[1]
    section = f"{{corpus: {corpus}, method: hybrid, encoder: {encoder}, cache_dir: {cache}, k: 2}}"
    done = run(tmp_path, "eval.yaml", "policies=[fixed:1]", f"retrieval={section}")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "retrieval = hybrid over 70 passages" in done.stderr
    document = results(tmp_path)
    assert document["retrieval"]["embeddings"] == prepared["embeddings"]
    assert all(len(record["history"][0]["retrieved_docs"]) == 2 for record in document["results"])


def test_without_sentence_transformers_it_says_what_to_install(
    encoder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 6, retrieval: an extra, not a core dependency."""
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(UserError, match="needs sentence-transformers") as refusal:
        prepare("dense", corpus, Chunking(), tmp_path, encoder=str(encoder))
    assert refusal.value.exit_code is ExitCode.MISSING
    assert refusal.value.hints == ("pip install 'trainwright[dense]'", "or retrieve by words: method: bm25")


def test_an_encoder_that_is_not_there_or_is_pickled_is_refused(
    encoder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 6, X: pickled weights are never loaded; a name that is not in the cache fails clearly without a network."""
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, words in (("acme/absent", "cannot be loaded from acme/absent"), (str(tmp_path / "pickled"), "pickled")):
        with pytest.raises(UserError, match=words) as refusal:
            prepare("dense", corpus, Chunking(), tmp_path / "cache", encoder=name)
        assert refusal.value.exit_code is ExitCode.MISSING
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither modules"):
        prepare("dense", corpus, Chunking(), tmp_path / "cache", encoder=str(tmp_path / "empty"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("section", "words"),
    [("method: dense", "`dense` needs `encoder`"), ("encoder: e", "`encoder` has no effect with bm25")],
)
def test_method_and_encoder_belong_together(section: str, words: str) -> None:
    """Issue 6: told before anything is read."""
    with pytest.raises(UserError) as refusal:
        load_evaluation(None, ["data=x", f"retrieval={{corpus: c, {section}}}"])
    assert words in refusal.value.render()

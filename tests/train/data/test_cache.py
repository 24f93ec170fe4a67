"""A token cache is there whole or not at all, and gives back what went in."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trainwright.errors import UserError
from trainwright.train.data.cache import CacheWriter, cache_path, read_meta
from trainwright.train.data.dataset import TokenDataset
from trainwright.train.data.packing import pack

KEY = "0123456789abcdef" * 4
SAMPLES = [{"input_ids": [1, 2, 3, i], "labels": [-100, 2, i]} for i in range(4, 24)]


def _fill(root: Path, key: str = KEY, samples: list[dict[str, list[int]]] = SAMPLES) -> Path:
    with CacheWriter(root, key, ("input_ids", "labels")) as writer:
        for sample in samples:
            writer.append(sample, targets=2)
        return writer.finish({"rows": len(samples)})


def test_samples_come_back_as_they_went_in(tmp_path: Path) -> None:
    data = TokenDataset(_fill(tmp_path))
    assert len(data) == len(SAMPLES)
    for index, sample in enumerate(SAMPLES):
        assert {name: tokens.tolist() for name, tokens in data[index].items()} == sample
    assert data.targets.tolist() == [2] * 20 and data.lengths.tolist() == [4] * 20
    assert (data.meta.tokens, data.meta.targets, data.meta.longest) == (80, 40, 4)
    with pytest.raises(IndexError):
        data[len(SAMPLES)]


def test_packs_are_sums_of_their_documents(tmp_path: Path) -> None:
    documents = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in (3, 5, 2, 6, 4)]
    with CacheWriter(tmp_path, KEY, ("input_ids", "labels")) as writer:
        for document in documents:
            writer.append(document, targets=len(document["labels"]) - 1)
        path = writer.finish({}, pack(writer.lengths(), 8))
    data = TokenDataset(path)
    assert data.targets.sum() == 15 and data.meta.targets == 15 and data.lengths.sum() == 20
    assert data.meta.longest == data.lengths.max() <= 8
    for index in range(len(data)):
        sample = data[index]
        assert len(sample["input_ids"]) == data.lengths[index]
        assert (sample["labels"][1:] != -100).sum() == data.targets[index]
        assert (sample["position_ids"] == sample["input_ids"]).all(), "each document here counts from 0"


def test_a_data_set_goes_to_a_spawned_process(tmp_path: Path) -> None:
    data = pickle.loads(pickle.dumps(TokenDataset(_fill(tmp_path))))
    assert data[3]["input_ids"].tolist() == SAMPLES[3]["input_ids"]


def test_content_hash_follows_the_tokens_and_not_the_key(tmp_path: Path) -> None:
    def content(key: str, samples: list[dict[str, list[int]]]) -> str:
        meta = read_meta(_fill(tmp_path, key * 64, samples))
        assert meta is not None
        return meta.content_sha256

    assert content("a", SAMPLES) == content("b", SAMPLES)
    assert content("c", SAMPLES[::-1]) != content("a", SAMPLES)
    moved = [{"input_ids": [1], "labels": [1]}, {"input_ids": [2, 3], "labels": [2, 3]}]
    joined = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [3], "labels": [3]}]
    assert content("d", moved) != content("e", joined), "same tokens, other borders"


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), CacheWriter(tmp_path, KEY, ("input_ids",)) as writer:
        writer.append({"input_ids": [1]}, 1)
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_what_a_killed_writer_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from trainwright.train.data.cache import CacheWriter\n"
        "with CacheWriter(Path(sys.argv[1]), 'k' * 64, ('input_ids',)) as writer:\n"
        "    writer.append({'input_ids': [1]}, 1)\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    _fill(tmp_path, "1" * 64)
    assert len(list(tmp_path.glob(".unfinished-*"))) == 1, "the child is alive and writing"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    _fill(tmp_path, "2" * 64)
    assert list(tmp_path.glob(".unfinished-*")) == []


def test_of_two_writers_one_wins_and_both_go_on(tmp_path: Path) -> None:
    barrier, paths = threading.Barrier(2), []

    def write() -> None:
        with CacheWriter(tmp_path, KEY, ("input_ids", "labels")) as writer:
            for sample in SAMPLES:
                writer.append(sample, 2)
            barrier.wait()
            paths.append(writer.finish({}))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache_path(tmp_path, KEY)] * 2
    assert TokenDataset(paths[0])[0]["input_ids"].tolist() == SAMPLES[0]["input_ids"]
    assert list(tmp_path.glob(".unfinished-*")) == []


@pytest.mark.parametrize("name", ["input_ids.bin", "labels.offsets", "targets"])
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_damaged_cache_is_seen_and_made_again(name: str, damage: str, tmp_path: Path) -> None:
    path = _fill(tmp_path)
    if damage == "cut":
        os.truncate(path / name, 4)
    else:
        (path / name).unlink()
    assert read_meta(path) is None
    with pytest.raises(UserError, match="missing or damaged"):
        TokenDataset(path)
    assert len(TokenDataset(_fill(tmp_path))) == len(SAMPLES)


def test_a_torn_meta_file_is_no_cache(tmp_path: Path) -> None:
    path = _fill(tmp_path)
    text = (path / "meta.json").read_text()
    for torn in (text[: len(text) // 2], "[]", json.dumps({"format": 1}), ""):
        (path / "meta.json").write_text(torn)
        assert read_meta(path) is None


@pytest.mark.parametrize("tokens", [[2**31], ["a"], [1.5]])
def test_what_is_no_token_is_refused(tokens: list[object], tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="32-bit integers into `input_ids`"),
        CacheWriter(tmp_path, KEY, ("input_ids",)) as writer,
    ):
        writer.append({"input_ids": tokens}, 1)  # type: ignore[dict-item]


def test_other_streams_than_the_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="made input_ids, not"), CacheWriter(tmp_path, KEY, ("ids", "labels")) as writer:
        writer.append({"input_ids": [1]}, 1)


_MEASURE = """
import sys
from trainwright.train.data.dataset import TokenDataset
from trainwright.train.data.order import epoch_order

data = TokenDataset(sys.argv[1])
order = epoch_order(0, 0, len(data))
data[0]
before = peak_kib()
total = sum(int(data[int(i)]["input_ids"].sum()) for i in order)
print(total, peak_kib() - before)
"""


def test_a_shuffled_epoch_leaves_memory_flat(numbers_of: Callable[..., list[int]], tmp_path: Path) -> None:
    """80 MB of tokens, all read in shuffled order, grow the process by less than 16 MiB."""
    with CacheWriter(tmp_path, KEY, ("input_ids",)) as writer:
        for i in range(20_000):
            writer.append({"input_ids": [i] * 1000}, 1)
        path = writer.finish({})
    total, grown_kib = numbers_of(_MEASURE, path)
    assert total == int(np.arange(20_000).sum()) * 1000
    assert grown_kib < 16 * 1024

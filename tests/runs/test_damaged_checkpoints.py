from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saving_run import content, save

from trainwright.runs import RunFolder
from trainwright.runs.checkpoints import CorruptCheckpoint, FileDigest, Manifest, newest_valid, read_manifest, verify

FILES = (*content(0), "manifest.json")
OUTSIDE = "the secret of another folder"


@pytest.fixture
def saved(folder: RunFolder) -> RunFolder:
    """A run with the whole checkpoints 10 and 20."""
    attempt = folder.start_attempt()
    save(folder, 10, attempt)
    save(folder, 20, attempt)
    return folder


def falls_back(folder: RunFolder, *named: str) -> str:
    """Check that checkpoint-20 is passed over for checkpoint-10, and return the reason, which names what is damaged."""
    path, manifest, skipped = newest_valid(folder)
    assert path == folder.checkpoint_dir(10) and manifest is not None and manifest.step == 10
    assert [entry.path.name for entry in skipped] == ["checkpoint-20"]
    for name in named:
        assert name in skipped[0].reason
    return skipped[0].reason


def forge(checkpoint: Path, **changes: Any) -> None:
    """Replace the manifest by one that lies, sealed as a right one is."""
    lying = dataclasses.replace(read_manifest(checkpoint), **changes)
    (checkpoint / "manifest.json").write_bytes(lying.to_bytes())


def test_whole_checkpoints_verify_and_the_newest_is_taken(saved: RunFolder) -> None:
    """C09-C11: nothing is passed over without damage, and what was stored comes back."""
    path, manifest, skipped = newest_valid(saved)
    assert path == saved.checkpoint_dir(20) and manifest is not None and skipped == []
    assert (manifest.run_id, manifest.step, manifest.attempt) == (saved.run_id, 20, 1)
    assert manifest.contract == {"seed": 1} and manifest.state == {"step": 20, "loss": 1 / 21}
    assert set(manifest.files) == set(content(20))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", ["nothing", "half", "all but one byte"])
def test_a_truncated_file_is_named_and_the_checkpoint_before_is_taken(saved: RunFolder, name: str, left: str) -> None:
    """C09"""
    victim = saved.checkpoint_dir(20) / name
    size = victim.stat().st_size
    os.truncate(victim, {"nothing": 0, "half": size // 2, "all but one byte": size - 1}[left])
    falls_back(saved, name)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_found(saved: RunFolder, name: str) -> None:
    """C10: ten random bits of the data files, and every single bit of the manifest."""
    victim = saved.checkpoint_dir(20) / name
    whole = victim.read_bytes()
    bits: Iterator[int] | list[int] = range(len(whole) * 8)
    if name != "manifest.json":
        bits = random.Random(name).sample(range(len(whole) * 8), 10)
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        victim.write_bytes(damaged)
        with pytest.raises(CorruptCheckpoint) as caught:
            verify(saved.checkpoint_dir(20), saved.run_id)
        assert name in caught.value.reason, f"bit {bit}"
    falls_back(saved, name)
    victim.write_bytes(whole)
    verify(saved.checkpoint_dir(20), saved.run_id)


@pytest.mark.parametrize("name", FILES)
def test_a_deleted_file_is_named_and_the_checkpoint_before_is_taken(saved: RunFolder, name: str) -> None:
    """C11"""
    (saved.checkpoint_dir(20) / name).unlink()
    assert "missing" in falls_back(saved, name)


def test_when_all_are_damaged_each_is_listed(saved: RunFolder) -> None:
    """C12: the caller learns that there were checkpoints and what is wrong with each, so it does not start anew."""
    (saved.checkpoint_dir(10) / "model.safetensors").unlink()
    (saved.checkpoint_dir(20) / "optimizer/rank_0.bin").write_bytes(b"")
    path, manifest, skipped = newest_valid(saved)
    assert path is None and manifest is None
    assert [entry.path.name for entry in skipped] == ["checkpoint-20", "checkpoint-10"]
    assert "optimizer/rank_0.bin" in skipped[0].reason and "model.safetensors" in skipped[1].reason


def test_a_checkpoint_of_another_run_is_passed_over_and_kept(saved: RunFolder, tmp_path: Path) -> None:
    """C13: also when its step is larger, and when this run comes to the same step."""
    other = RunFolder(tmp_path / "other")
    other.create()
    stray = save(other, 9999, other.start_attempt())
    planted = Path(shutil.copytree(stray, saved.checkpoint_dir(9999)))
    path, _, skipped = newest_valid(saved)
    assert path == saved.checkpoint_dir(20)
    assert [entry.path for entry in skipped] == [planted] and other.run_id in skipped[0].reason
    verify(planted, other.run_id)

    save(saved, 9999, saved.start_attempt())
    _, manifest, _ = newest_valid(saved)
    assert manifest is not None and manifest.run_id == saved.run_id and manifest.step == 9999
    (kept,) = saved.path.glob("foreign-checkpoint-9999-*")
    assert verify(kept).run_id == other.run_id


def test_a_checkpoint_under_the_name_of_another_step_is_refused(saved: RunFolder) -> None:
    """C13: a copied folder is not a later state of the run."""
    shutil.copytree(saved.checkpoint_dir(20), saved.checkpoint_dir(30))
    path, _, skipped = newest_valid(saved)
    assert path == saved.checkpoint_dir(20)
    assert "step 20" in skipped[0].reason


@pytest.mark.parametrize(
    "name",
    [
        "../outside/model.safetensors",
        "/etc/hostname",
        "..",
        ".",
        "",
        "a/../../x",
        "a//b",
        "./a",
        "a\0b",
        "\ud800",
        "\x1b[2J",
    ],
)
def test_a_manifest_that_lists_paths_outside_is_refused(saved: RunFolder, name: str) -> None:
    """X10, X04, X06: with a right sha256 of its own; the reason can be printed on a terminal."""
    forge(saved.checkpoint_dir(20), files={name: FileDigest(1, "0" * 64)})
    reason = falls_back(saved, "manifest.json", "not a path inside")
    assert reason.isprintable() and reason.isascii()


@pytest.mark.parametrize("size_bytes", [-1, 10**17, 10**30, True, "12", None, 1.5])
def test_a_manifest_with_an_impossible_size_is_refused_at_once(saved: RunFolder, size_bytes: Any) -> None:
    """X10"""
    started_s = time.monotonic()
    forge(saved.checkpoint_dir(20), files={"model.safetensors": FileDigest(size_bytes, "0" * 64)})
    falls_back(saved, "model.safetensors")
    assert time.monotonic() - started_s < 10, "it was read"


def test_a_file_that_grew_to_a_tebibyte_is_not_read(saved: RunFolder) -> None:
    """X10: the size is compared before a byte is hashed."""
    os.truncate(saved.checkpoint_dir(20) / "model.safetensors", 2**40)
    started_s = time.monotonic()
    falls_back(saved, "model.safetensors has 1099511627776 bytes")
    assert time.monotonic() - started_s < 10, "it was read"


def test_a_huge_manifest_is_not_read(saved: RunFolder) -> None:
    """X10: 1 TiB of manifest costs neither memory nor time."""
    os.truncate(saved.checkpoint_dir(20) / "manifest.json", 2**40)
    started_s = time.monotonic()
    falls_back(saved, "manifest.json")
    assert time.monotonic() - started_s < 10, "it was read"


_opened: list[str] | None = None


def _record_opens(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes) else "")


sys.addaudithook(_record_opens)


@pytest.mark.parametrize("linked", ["file", "folder", "manifest", "checkpoint", "pipe"])
def test_links_and_pipes_are_refused_and_nothing_outside_is_opened(
    saved: RunFolder, tmp_path: Path, linked: str
) -> None:
    """X10, X04: what they lead to has the right content, so only the link can be the reason."""
    global _opened
    checkpoint = saved.checkpoint_dir(20)
    outside = tmp_path / "outside"
    named = {"file": "model.safetensors", "folder": "optimizer", "manifest": "manifest.json"}
    if linked == "checkpoint":
        checkpoint.rename(outside)
        checkpoint.symlink_to(outside)
    elif linked == "pipe":
        (checkpoint / "model.safetensors").unlink()
        os.mkfifo(checkpoint / "model.safetensors")
    else:
        outside.mkdir()
        (checkpoint / named[linked]).rename(outside / named[linked])
        (checkpoint / named[linked]).symlink_to(outside / named[linked])
    _opened = []
    try:
        falls_back(saved)
        opened = _opened
    finally:
        _opened = None
    assert any("checkpoint-10/model.safetensors" in path for path in opened), "the audit saw nothing"
    assert not [path for path in opened if "outside" in str(Path(path).resolve()) or "checkpoint-20/optimizer" in path]


def test_a_file_that_the_manifest_does_not_list_does_no_harm(saved: RunFolder) -> None:
    """A Mac's Finder or an editor leaves files of its own; they are not part of the checkpoint."""
    (saved.checkpoint_dir(20) / ".DS_Store").write_bytes(b"x")
    path, manifest, _ = newest_valid(saved)
    assert path == saved.checkpoint_dir(20) and manifest is not None and ".DS_Store" not in manifest.files


def test_names_that_only_look_like_checkpoints_are_ignored(saved: RunFolder) -> None:
    """C13, X04: files, odd numbers, and digits of other scripts."""
    for name in (
        "checkpoint-",
        "checkpoint-030",
        "checkpoint--5",
        "checkpoint-1e3",
        "checkpoint-٣٠",
        "checkpoint-30.bak",
    ):
        (saved.path / name).mkdir()
    (saved.path / ("checkpoint-" + "9" * 200)).mkdir()
    (saved.path / "checkpoint-40").write_text("a file")
    (saved.path / "checkpoint-50").mkdir()
    path, _, skipped = newest_valid(saved)
    assert path == saved.checkpoint_dir(20)
    assert [entry.path.name for entry in skipped] == ["checkpoint-50", "checkpoint-40"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
in_one_folder = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@in_one_folder
@given(raw=st.binary(max_size=300) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_manifest_are_passed_over(saved: RunFolder, raw: bytes) -> None:
    """C09, D04: never an exception, whatever the file holds."""
    (saved.checkpoint_dir(20) / "manifest.json").write_bytes(raw)
    falls_back(saved, "manifest.json")


@in_one_folder
@given(
    field=st.sampled_from(["run_id", "step", "attempt", "files", "contract", "state", "schema_version", "extra"]),
    value=json_values,
)
def test_any_value_in_a_sealed_manifest_is_survived(saved: RunFolder, field: str, value: Any) -> None:
    """X10: the lie carries a right sha256; either it is refused, or it changed nothing that matters."""
    from trainwright.runs.manifest import _with_own_digest

    checkpoint = saved.checkpoint_dir(20)
    sealed = json.loads(Manifest(saved.run_id, 20, 1, {}, {}, {}, "").to_bytes())
    del sealed["sha256"]
    (checkpoint / "manifest.json").write_bytes(_with_own_digest({**sealed, field: value}))
    path, manifest, skipped = newest_valid(saved)
    assert path in (checkpoint, saved.checkpoint_dir(10))
    assert all(entry.reason.isprintable() for entry in skipped)
    if path == checkpoint:
        assert manifest is not None and manifest.run_id == saved.run_id and manifest.step == 20


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
def test_a_deeply_nested_manifest_is_passed_over(saved: RunFolder, depth: int) -> None:
    """X10: no stack overflow."""
    (saved.checkpoint_dir(20) / "manifest.json").write_bytes(b'{"a":' * depth + b"1" + b"}" * depth)
    falls_back(saved, "manifest.json")

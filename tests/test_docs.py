"""The pages that a stranger reads first: links lead somewhere, the example job is a job, both languages agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainwright.job.loading import load_job

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_example_job_is_a_job(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    path = tmp_path / "job.yaml"
    path.write_text(blocks[0], encoding="utf-8")
    job = load_job(str(path)).job
    assert job.train.global_batch_size == 32
    assert job.method.type == "lora"


def test_both_languages_show_the_same_recording_figures_and_commands() -> None:
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")]
    recordings, commands, proofs = zip(
        *[
            (
                re.findall(r"```console\n(.*?)```", page, re.DOTALL),
                re.findall(r"^trainwright \S+ \S+", page, re.MULTILINE),
                re.findall(r"^\|.*\| (`[^`]+`) \|$", page, re.MULTILINE),
            )
            for page in pages
        ],
        strict=True,
    )
    assert recordings[0] == recordings[1] != []
    assert commands[0] == commands[1] != []
    assert proofs[0] == proofs[1] != []


def test_the_readme_stays_short() -> None:
    assert (ROOT / "README.md").stat().st_size < 12_000

"""`trainwright demo` on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

from trainwright.demo.files import DemoFolder
from trainwright.job.loading import load_job


def test_a_folder_that_cannot_be_made_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    command = [sys.executable, "-m", "trainwright", "demo", "--output-dir", str(tmp_path / "file" / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 73
    assert "error: the demo cannot be written to" in done.stderr
    assert "hint: choose another folder with --output-dir" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_demo_itself_needs_no_torch() -> None:
    program = "import sys; import trainwright.demo.tour; print({'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_its_job_files_are_valid_whatever_the_folder_is_called(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "odd: #{name} \"quoted\" \\ 'é'")
    folder.write(seed=5)
    base, lora = load_job(str(folder.base_job)).job, load_job(str(folder.lora_job)).job
    assert base.output_dir == lora.output_dir == str(folder.path)
    assert base.data.path == str(folder.stories)
    assert base.train.seed == lora.train.seed == 5
    assert (base.resources.ranks, base.resources.device) == (2, "cpu")
    assert lora.model.name == str(folder.run.final_model_dir)
    assert YAML(typ="safe").load(folder.base_job)["name"] == "demo"

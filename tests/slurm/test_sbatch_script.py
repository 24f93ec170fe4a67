"""The batch script is a pure function, is read by bash and by Slurm as it is meant, and holds nothing of a job."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from slurm_bed import SlurmBed

from trainwright.errors import UserError
from trainwright.launch.slurm.batch_script import ScriptInput, sbatch_options, script_text
from trainwright.plan.slurm.slurm_request import SlurmRequest

GOLDEN = Path(__file__).parent / "golden" / "job.sbatch"
REQUEST = SlurmRequest(
    partition="gpu", nodes=2, gpus_per_node=4, gpu_type="a100", time_limit_min=1530, memory_mib=128_000, cpus=32
)
HOSTILE = (
    "$(touch canary)",
    "`touch canary`",
    "'; touch canary; '",
    '"; touch canary; "',
    "a\n#SBATCH --wrap=touch",
    "a\r#SBATCH --uid=0",
    "#SBATCH --uid=0",
    "--wrap=touch canary",
    "a;touch canary",
    "a|touch canary",
    "a&touch canary",
    "${IFS}canary",
    "a b",
    "a\tb",
    "a\x00b",
    "a\x1b[31m",
    "\u202eabc",
    "äöü €",
    "%j%x%%",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "\\",
    "~/x",
    "*",
    "!x",
)


def script_input(**changed: object) -> ScriptInput:
    made = {
        "name": "paper_r64",
        "request": REQUEST,
        "job_json": Path("/home/ann/outputs/paper_r64/launcher/job.json"),
        "logs_dir": Path("/home/ann/outputs/paper_r64/logs"),
        "working_dir": Path("/home/ann"),
        "python": "/opt/venv/bin/python",
    }
    return ScriptInput(**{**made, **changed})  # type: ignore[arg-type]


def test_the_script_is_the_golden_one() -> None:
    """S0-24, S0-34, S1-13: names, logs, resources and signal are written out; the same input gives the same bytes."""
    assert script_text(script_input()) == GOLDEN.read_text()


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("field", ["partition", "gpu_type", "constraint", "account", "qos"])
def test_a_hostile_name_is_refused_where_slurm_has_none_such(field: str, hostile: str) -> None:
    """X03: nothing that a shell or an #SBATCH line would read otherwise gets as far as a script."""
    if field == "constraint" and hostile in ("*", "a&touch canary", "a|touch canary"):
        hostile += " "
    with pytest.raises(UserError):
        SlurmRequest(**{**{key: getattr(REQUEST, key) for key in REQUEST.__dataclass_fields__}, field: hostile})


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_path_is_refused_or_stays_one_word(hostile: str, tmp_path: Path) -> None:
    """X03: of a path in the script, bash makes exactly that argument, and no line more than the golden script has."""
    job_json = Path("/runs") / hostile / "job.json"
    try:
        text = script_text(script_input(job_json=job_json, logs_dir=Path("/runs") / hostile))
    except UserError:
        assert not hostile.isprintable() or "\\" in hostile
        return
    assert len(text.splitlines()) == len(GOLDEN.read_text().splitlines())
    shown = tmp_path / "shown"
    # The interpreter is replaced by a program that writes down its arguments.
    harmless = text.replace("exec /opt/venv/bin/python", f"exec printf '%s\\0' > {shlex.quote(str(shown))}")
    subprocess.run(["bash"], input=harmless, cwd=tmp_path, text=True, check=True)
    assert shown.read_text().split("\0")[:-1] == ["-m", "trainwright.launch.slurm.batch", str(job_json)]
    assert [path.name for path in tmp_path.iterdir()] == ["shown"]


def test_slurm_reads_the_paths_that_the_script_writes(slurm: SlurmBed) -> None:
    """S0-24: blanks, quotes, `$()`, `%` and unicode in the folder of the logs, as sbatch itself reads its script."""
    logs = slurm.root / "a b'\"$(touch canary)%j é"
    logs.mkdir()
    request = SlurmRequest(
        partition="gpu", nodes=1, gpus_per_node=1, gpu_type=None, time_limit_min=5, memory_mib=100, cpus=1
    )
    given = script_input(
        request=request, logs_dir=logs, job_json=logs / "job.json", working_dir=logs, python=str(logs / "tell")
    )
    (logs / "tell").write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$*"\n')
    (logs / "tell").chmod(0o700)
    script = logs / "job.sbatch"
    script.write_text(script_text(given))
    for options in ((), sbatch_options(given)):
        submitted = slurm.run("sbatch", "--parsable", *options, str(script), cwd=slurm.root)
        job_id = submitted.stdout.strip()
        assert slurm.wait_job(job_id)["JobState"] == "COMPLETED"
        said = (logs / f"train_paper_r64_{job_id}.out").read_text()
        assert said == f"{logs}\n-m trainwright.launch.slurm.batch {logs / 'job.json'}\n"
    assert not list(slurm.root.rglob("canary"))


SITE = """\
#!/bin/bash
{{ directives }}
#SBATCH --mail-type=FAIL
module() { export CUDA_HOME=/opt/$2; }
module load cuda
{{ launch }}
"""


def test_a_sites_template_takes_the_place_of_the_text() -> None:
    """Its own lines stand around the two that are ours."""
    text = script_text(script_input(), SITE)
    assert "#SBATCH --mail-type=FAIL\n" in text
    own = [line for line in GOLDEN.read_text().splitlines() if line.startswith(("#SBATCH", "exec"))]
    assert [line for line in text.splitlines() if line in own] == own


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (SITE.replace("{{ launch }}", ""), "{{ launch }}"),
        (SITE.replace("{{ directives }}", ""), "{{ directives }}"),
        (SITE.replace("{{ launch }}", "{{ launch }} &"), "{{ launch }}"),
        (SITE.replace("{{ launch }}", "{{ lanch }}"), "lanch"),
        (SITE.replace("{{ launch }}", "{{ launch }}\nif"), "syntax error"),
        (SITE.replace("{{ directives }}", "").replace("cuda\n", "cuda\n{{ directives }}\n"), "#SBATCH"),
        (SITE.replace("#!/bin/bash\n", ""), "first line"),
    ],
)
def test_a_template_that_would_not_run_is_refused(template: str, complaint: str) -> None:
    """A placeholder that that is missing, misspelt or does nothing where it is is found before anything waits."""
    with pytest.raises(UserError) as caught:
        script_text(script_input(), template)
    assert complaint in caught.value.render()

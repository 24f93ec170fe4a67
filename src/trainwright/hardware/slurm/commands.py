"""Running Slurm's own programs: argument lists, a time limit, and text in one form whatever the user's settings."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from typing import Final

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.reading import printable
from trainwright.hardware.slurm.cluster import Cluster
from trainwright.hardware.slurm.cluster_parser import QUEUE_FORMAT, QUOTA_FORMAT, Texts, read_cluster

TIMEOUT_S: Final = 60
_RESHAPING: Final = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_")
"""Variables with these beginnings change what the programs print."""


def local_cluster() -> Cluster:
    """Return the cluster that this machine submits to.

    Raises:
        UserError: exit 4; there is no Slurm here, or it does not answer.
    """
    user = own_name()
    texts = Texts(
        config=slurm_output("scontrol", "show", "config"),
        nodes=slurm_output("scontrol", "-o", "show", "node", "-d"),
        partitions=slurm_output("scontrol", "-o", "show", "partition"),
        queue=slurm_output("squeue", "--noheader", "-o", QUEUE_FORMAT),
        reservations=slurm_output("scontrol", "-o", "show", "reservation"),
        quotas=_quotas(user),
    )
    return read_cluster(texts, user)


def own_name() -> str:
    """Return the name that Slurm knows the user by, the number where it has none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def slurm_output(*command: str) -> str:
    """Return what a program of Slurm's printed.

    Raises:
        UserError: exit 4; it is not here, it failed, or the controller does not answer.
    """
    done = run_slurm(*command)
    if done.returncode:
        said = printable(" ".join(done.stderr.split())) or f"exit {done.returncode}"
        raise UserError(
            f"Slurm does not answer: `{' '.join(command[:3])}` says: {said}",
            hints=["look at the controller: scontrol ping", "or plan for GPUs written down: --gpus a100-80gb:4"],
            exit_code=ExitCode.MISSING,
        )
    return done.stdout


class SlurmAwayError(UserError):
    """Slurm is here and does not answer, which may be over in a moment: its controller restarts, or is busy."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"Slurm does not answer: {message}",
            hints=["look at the controller: scontrol ping"],
            exit_code=ExitCode.MISSING,
        )


def run_slurm(*command: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run a program of Slurm's and return its text and exit status.

    Raises:
        UserError: exit 4; it is not installed here.
        SlurmAwayError: exit 4; it takes longer than `timeout_s`.
    """
    program = shutil.which(command[0])
    if program is None:
        raise UserError(
            f"there is no Slurm here: `{command[0]}` is not on the PATH",
            hints=[
                "run this on the cluster's login node, after what its guide says to load (often `module load slurm`)",
                "or plan for GPUs written down: trainwright plan JOB --gpus a100-80gb:4",
            ],
            exit_code=ExitCode.MISSING,
        )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_RESHAPING)}
    environment |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(
            [program, *command[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmAwayError(f"`{command[0]}` printed nothing in {timeout_s:g} s") from None


def _quotas(user: str) -> str | None:
    """Limits of the user's accounts, None where the cluster keeps no accounts or does not show them."""
    if shutil.which("sacctmgr") is None:
        return None
    done = run_slurm("sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", f"format={QUOTA_FORMAT}")
    return done.stdout if done.returncode == 0 else None

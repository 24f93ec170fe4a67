"""Scripts run as the ranks of one gloo group, and how they join it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

RANKS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}


def run_group(command: Sequence[str], folder: Path, ranks: int = 2) -> list[str]:
    """Run a script as the ranks of one gloo group and return what each printed; they are in it by `joined`.

    They meet at a file, where a port found free could be another's by then, and write to files, where a pipe that
    nobody reads yet would stop a rank that the others wait for.
    """
    meeting = Path(tempfile.mkdtemp(dir=folder))
    variables = RANKS | {"STORE": str(meeting / "store"), "WORLD_SIZE": str(ranks)}
    with contextlib.ExitStack() as files:
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=files.enter_context((meeting / f"{rank}.out").open("w")),
                stderr=files.enter_context((meeting / f"{rank}.err").open("w")),
            )
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.wait(timeout=300)
        except subprocess.TimeoutExpired:
            pass
        finally:
            codes = [process.poll() for process in processes]
            for process in processes:
                process.kill()
    errors = "\n".join((meeting / f"{rank}.err").read_text()[-3000:] for rank in range(ranks))
    assert codes == [0] * ranks, f"exit codes {codes}:\n{errors}"
    return [(meeting / f"{rank}.out").read_text() for rank in range(ranks)]


@contextlib.contextmanager
def joined() -> Iterator[int]:
    """Be in the gloo group of `run_group`, as the rank returned.

    A process that ends while the group's threads run is aborted at times ("terminate called without an active
    exception").
    """
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=ranks)
    yield rank
    dist.destroy_process_group()

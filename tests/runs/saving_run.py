"""A run that only saves: the process that the tests crash, starve and race. Imports nothing but trainwright.runs.

    python -S -E saving_run.py RUN_DIR start             lock the run, start an attempt, wait until stdin closes
    python -S -E saving_run.py RUN_DIR save KEEP BEST STEP...   the same, then save each step and retain
    python -S -E saving_run.py RUN_DIR go-on ATTEMPT KEEP BEST STEP...   save under an attempt that runs already

What is done is told on stdout, one line each, once it is done. SAVING_RUN_WAITS=none tries again without waiting.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from trainwright.errors import UserError
from trainwright.runs import RunFolder, RunLock, retry_storage, storage
from trainwright.runs.checkpoints import commit, discard_staging, open_staging, retain, seal_file


def content(step: int) -> dict[str, bytes]:
    """Return the files of the checkpoint of a step."""
    return {"model.safetensors": f"weights {step} ".encode() * 400, "optimizer/rank_0.bin": f"state {step}".encode()}


def save(folder: RunFolder, step: int, attempt: int, files: dict[str, bytes] | None = None) -> Path:
    """Save a step once, as a worker does."""
    staging = open_staging(folder, step, attempt)
    digests = {}
    for name, data in (content(step) if files is None else files).items():
        (staging / name).parent.mkdir(exist_ok=True)
        (staging / name).write_bytes(data)
        digests[name] = seal_file(staging / name)
    return commit(folder, step, attempt, digests, contract={"seed": 1}, state={"step": step, "loss": 1 / (step + 1)})


def tell(line: str) -> None:
    """Write one line to stdout in one call."""
    os.write(1, f"{line}\n".encode())


def save_each(folder: RunFolder, attempt: int, keep: int, best: int, steps: list[int]) -> None:
    for step in steps:
        retry_storage(
            lambda step=step: save(folder, step, attempt),
            f"saving checkpoint-{step}",
            path=folder.path,
            needed_bytes=sum(len(data) for data in content(step).values()),
            clean_up=lambda step=step: discard_staging(folder, step, attempt),
        )
        tell(f"committed {step}")
        retain(folder, keep, best)
        tell(f"retained {step}")


def main(run_dir: str, mode: str, *numbers: str) -> None:
    folder = RunFolder(run_dir)
    if mode == "go-on":
        attempt, keep, best, *steps = map(int, numbers)
        if os.environ.get("SAVING_RUN_WAITS") == "none":
            storage.time.sleep = lambda _: None
        save_each(folder, attempt, keep, best, steps)
        return
    folder.create()
    with RunLock(folder):
        attempt = folder.start_attempt()
        tell(f"attempt {attempt}")
        if mode == "start":
            sys.stdin.read()
        else:
            keep, best, *steps = map(int, numbers)
            save_each(folder, attempt, keep, best, steps)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)

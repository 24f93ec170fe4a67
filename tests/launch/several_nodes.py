"""Trains a job on two launchers of this machine, as `--nodes` would on two: `python several_nodes.py JOB`."""

from __future__ import annotations

import sys
from pathlib import Path

from trainwright.errors import UserError
from trainwright.job.loading import load_job
from trainwright.launch.multi_node import on_nodes
from trainwright.launch.supervision import StopAsked
from trainwright.launch.train_run import TrainOptions, plan_here, run_planned
from trainwright.runs.folder import RunFolder


def starters(file: Path) -> list[list[str]]:
    """Return the command of each node's launcher."""
    launcher = [sys.executable, "-m", "trainwright.launch.node", str(file), "--node-rank"]
    return [[*launcher, str(node)] for node in range(2)]


if __name__ == "__main__":
    job, plan = plan_here(load_job(sys.argv[1]), None)
    folder, stop = RunFolder(Path(job.output_dir) / job.name), StopAsked()
    with stop.listening():
        started = on_nodes(2, "127.0.0.1", starters)
        try:
            sys.exit(run_planned(folder, job, plan, TrainOptions(), stop, start_ranks=started))
        except UserError as error:
            print(error.render(), file=sys.stderr)
            sys.exit(error.exit_code)

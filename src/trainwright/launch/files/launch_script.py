"""launch.sh: the ranks of a plan under torchrun, or under the launcher of a user's own script.

Fixed text, whole numbers and device names of a few plain characters: no value of a job is ever shell text, as the
script finds the job in the files beside itself.
"""

from __future__ import annotations

import re

from trainwright.errors import UserError
from trainwright.launch.files.accelerate import MULTI_NODE, SINGLE_NODE
from trainwright.launch.files.nodes import Nodes
from trainwright.plan.layout import Layout

LAUNCH_SH = "launch.sh"
SCRIPT_JSON = "script.json"
_DEVICES = re.compile(r"[A-Za-z0-9][A-Za-z0-9,/:-]*", re.ASCII)
"""Indices, GPU UUIDs and MIG ids with commas between them."""


def launch_script(layout: Layout, nodes: Nodes, launcher: str | None = None) -> str:
    """Return the text of launch.sh; `launcher` is that of the job's own script, None for the built-in trainer.

    Raises:
        UserError: nodes and layout do not go together, or a device has a name that none can have.
    """
    nodes.require(layout)
    devices = layout.visible_devices
    if devices is not None and not _DEVICES.fullmatch(devices):
        raise UserError(f"{devices!r} is no list of GPU indices, UUIDs or MIG ids")
    parts = [_HEAD, _usage(layout, nodes) if launcher is None else _script_usage(nodes), _START]
    parts += [_device_lines(layout, devices), _threads(nodes)]
    if launcher is None:
        return "\n".join([*parts, _OWN_SCRIPT, _several(nodes) if nodes.count > 1 else _single(nodes)])
    parts.append(_SCRIPT_OF_JOB if launcher != "deepspeed" else _SCRIPT_OF_JOB.replace("-m", "--module", 1))
    return "\n".join([*parts, _script_start(launcher, nodes)])


_HEAD = "#!/usr/bin/env bash"
_LAUNCHER = "python -m trainwright.train.launcher"
"""Starts each of the launchers with its ports on one address, where they would be open on every interface."""

_START = """\
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_PROGRESS_BARS=1 CUDA_DEVICE_ORDER=PCI_BUS_ID"""

_OWN_SCRIPT = """\
(($#)) || set -- -m trainwright.train.under_torchrun "$here\""""

_MEETING = """\
: "${{NODE_RANK:=${{SLURM_NODEID:?set NODE_RANK to the number of this machine, 0 to {last}}}}}"
: "${{MASTER_ADDR:?set MASTER_ADDR to the address of machine number 0}}\""""

_SCRIPT_OF_JOB = f"""\
(($#)) || set -- -m trainwright.launch.own_script.rank "$here/{SCRIPT_JSON}\""""


def _script_usage(nodes: Nodes) -> str:
    started = f"bash {LAUNCH_SH}"
    if nodes.count > 1:
        started = f"NODE_RANK=0 MASTER_ADDR=ADDRESS {started}    on each of {nodes.count} machines, with its own number"
    return f"""\
# Runs the command in {SCRIPT_JSON} beside this file, as plan.json says:
#   {started}
# It starts from the beginning each time and keeps no log: `trainwright train` resumes and records."""


def _script_start(launcher: str, nodes: Nodes) -> str:
    several = nodes.count > 1
    match launcher:
        case "torchrun" | "accelerate" if several:  # what accelerate would tell its ranks is in script.json
            return _several(nodes)
        case "torchrun":
            return _single(nodes)
        case "accelerate":
            return f'exec {_LAUNCHER} accelerate --config_file "$here/{SINGLE_NODE}" "$@"\n'
        case "deepspeed":
            return f'exec {_LAUNCHER} deepspeed --num_gpus={nodes.ranks_per_node} --no_local_rank "$@"\n'
        case _:
            return 'exec python "$@"\n'


def _usage(layout: Layout, nodes: Nodes) -> str:
    if nodes.count == 1:
        return f"""\
# Runs what plan.json beside this file says, in {_counted(layout.ranks, "process", "processes")} on this machine:
#   bash {LAUNCH_SH}                        started again, it goes on from its last checkpoint
#   bash {LAUNCH_SH} train.py --epochs 3    a script of your own in place of it, under torchrun alike
# A script that uses accelerate gets the strategy of the plan from accelerate's own launcher:
#   accelerate launch --config_file {SINGLE_NODE} train.py
# Paths in the job count from the folder that this is started in."""
    return f"""\
# Runs what plan.json beside this file says on {nodes.count} machines, {nodes.ranks_per_node} ranks each. On each:
#   NODE_RANK=0 MASTER_ADDR=ADDRESS bash {LAUNCH_SH}                 its own number, the address of number 0
#   NODE_RANK=0 MASTER_ADDR=ADDRESS bash {LAUNCH_SH} train.py ...    a script of your own in place of it
# MASTER_PORT is 29500 unless set. Under Slurm (`srun --ntasks-per-node=1 bash {LAUNCH_SH}`) the number is known.
# A script that uses accelerate gets the strategy of the plan from accelerate's own launcher:
#   accelerate launch --config_file {MULTI_NODE} --machine_rank 0 --main_process_ip ADDRESS train.py
# Paths in the job count from the folder that this is started in, and must mean the same on every machine: run folder,
# data, and data.cache_dir (~/.cache/trainwright) lie on a file system that all of them share."""


def _device_lines(layout: Layout, devices: str | None) -> str:
    if devices is not None:
        return f'export CUDA_VISIBLE_DEVICES="${{CUDA_VISIBLE_DEVICES-{devices}}}"'
    lines = f"export CUDA_VISIBLE_DEVICES='' DS_ACCELERATOR={layout.device}"
    return f"{lines} ACCELERATE_USE_CPU=true" if layout.device == "cpu" else lines


def _threads(nodes: Nodes) -> str:
    # torchrun would set 1 for every process, which leaves most cores of a CPU run idle.
    return f"""\
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
share=$((cores / {nodes.ranks_per_node}))
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((share > 0 ? share : 1))}}"
# Threads that spin while they wait make a step many times as long where another program runs on one of the cores.
[[ -n ${{GOMP_SPINCOUNT-}}${{KMP_BLOCKTIME-}} ]] || export OMP_WAIT_POLICY="${{OMP_WAIT_POLICY:-PASSIVE}}\""""


def _single(nodes: Nodes) -> str:
    return f"""\
exec {_LAUNCHER} torchrun --nproc-per-node={nodes.ranks_per_node} "$@"
"""


def _several(nodes: Nodes) -> str:
    return f"""\
{_MEETING.format(last=nodes.count - 1)}
exec {_LAUNCHER} torchrun --nnodes={nodes.count} --nproc-per-node={nodes.ranks_per_node} \\
  --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${{MASTER_PORT:-29500}}" \\
  --rdzv-id="${{SLURM_JOB_ID:-trainwright}}" "$@"
"""


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"

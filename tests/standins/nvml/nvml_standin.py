"""The stand-in NVML library, built with the machine's C compiler, and machines for it to show."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("standin_nvml.c")


@dataclass(frozen=True)
class NvmlStandin:
    """Runs Python with a machine's GPUs in place of those that are there."""

    folder: Path

    @classmethod
    def build(cls, folder: Path) -> NvmlStandin:
        """Compile the library into `folder`."""
        name = "libnvidia-ml.so.1"
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(folder / name), str(SOURCE), f"-Wl,-soname,{name}"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        return cls(folder)

    def python(self, machine: str | None, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS` on a machine; None for one whose driver is not loaded."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "STANDIN_"))}
        environment |= {"LD_LIBRARY_PATH": str(self.folder), **variables}
        if machine is not None:
            file = self.folder / "machine.txt"
            file.write_text(machine)
            environment["STANDIN_NVML"] = str(file)
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


TWO_A100_TWO_V100 = """\
driver 550.54.15 12040
gpu NVIDIA_A100-SXM4-40GB cc=8.0 mem=40960 used=31000 util=12 nvlink=1 links=12 numa=0 proc=4000001:30500
gpu NVIDIA_A100-SXM4-40GB cc=8.0 mem=40960 used=300 nvlink=1 links=12 numa=0
gpu Tesla_V100-SXM2-32GB cc=7.0 mem=32768 used=16000 util=88 nvlink=2 links=6 numa=1 proc=4000002:15600
gpu Tesla_V100-SXM2-32GB cc=7.0 mem=32768 used=5 nvlink=2 links=6 numa=1
"""

TWO_A100_TWO_V100_AT_WORK = "\n".join(
    (
        "driver 550.54.15 12040",
        "gpu NVIDIA_A100-SXM4-40GB cc=8.0 mem=40960 used=31000 util=97 memutil=55 temp=64 power=310 limit=400 "
        "nvlink=1 links=12 pcie=1048576 nvlinkkib=2048 proc=4000001:30500",
        "gpu NVIDIA_A100-SXM4-40GB cc=8.0 mem=40960 used=39000 util=96 temp=91 power=395 limit=400 nvlink=1 links=12 "
        "clock=705 throttle=104",
        "gpu Tesla_V100-SXM2-32GB cc=7.0 mem=32768 used=16000 util=31 temp=58 power=120 limit=300 nvlink=2 links=6 "
        "na=counters",
        "gpu Tesla_V100-SXM2-32GB cc=7.0 mem=32768 used=24000 util=88 temp=71 power=250 limit=300 nvlink=2 links=6",
        "",
    )
)
"""The second A100 is hot and slowed down: 104 is hw_slowdown, sw_thermal_slowdown and hw_thermal_slowdown."""

FOUR_A100 = "".join(f"gpu NVIDIA_A100-SXM4-80GB cc=8.0 mem=81920 used={gpu}\n" for gpu in range(4))

GPU_1_LOST = """\
gpu NVIDIA_A100-SXM4-80GB cc=8.0 mem=81920
gpu NVIDIA_A100-SXM4-80GB cc=8.0 mem=81920 lost=1
gpu NVIDIA_A100-SXM4-80GB cc=8.0 mem=81920
"""

GPU_1_DIES_WHILE_READ = GPU_1_LOST.replace("lost=1", "dying=1")

NO_LOAD_READABLE = """\
gpu NVIDIA_GeForce_RTX_3090 cc=8.6 mem=24576 na=memory,procs,util,temp,power,clock,throttle,ecc,events,counters,pcie
"""

NOTHING_READABLE = "gpu NVIDIA_GeForce_RTX_3090 na=memory,cc,pcie,nvlink,numa,procs\n"

MIG = """\
gpu NVIDIA_A100-SXM4-40GB cc=8.0 mem=40960 used=40 uuid=GPU-11111111-aaaa
mig 3g.20gb mem=19968 used=25 slices=3
mig 1g.5gb mem=4864 used=12 slices=1
gpu NVIDIA_A100-SXM4-40GB cc=8.0 mem=40960 uuid=GPU-22222222-aaaa
"""

MIG_WITHOUT_INSTANCES = "gpu NVIDIA_A100-SXM4-40GB cc=8.0 mem=40960 migmode=1\n"

GPUS_0_AND_1_CLOSED = """\
gpu NVIDIA_A100-SXM4-80GB cc=8.0 mem=81920 closed=1
gpu NVIDIA_A100-SXM4-80GB cc=8.0 mem=81920 closed=1
gpu NVIDIA_A100-SXM4-80GB cc=8.0 mem=81920
gpu NVIDIA_A100-SXM4-80GB cc=8.0 mem=81920
"""

LIBRARY_NEWER_THAN_DRIVER = "init 18\n"

NO_GPU = "driver 550.54.15 12040\n"

UNKNOWN_MODEL = "gpu NVIDIA_X9000 cc=13.0 mem=200000\n"

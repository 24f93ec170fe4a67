"""A rank's memory on its GPU as nvidia-smi shows it; what whole runs measure is tested in test_changing_ranks.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "standins" / "nvml"))

from nvml_standin import NvmlStandin

MIB = 1 << 20
ASK = """
import json, os, sys, types
from pathlib import Path
import torch
from trainwright.train.measuring import device_bytes

# A build of torch without CUDA knows no GPU; NVML, which is asked for the memory, is the stand-in's.
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="22222222-bbbb")
found = []
for machine in sys.argv[1:]:
    Path(os.environ["STANDIN_NVML"]).write_text(machine.replace("OWN", str(os.getpid())))
    found.append(device_bytes(torch.device("cuda", 0)))
print(json.dumps(found))
"""
TWO_GPUS = """\
gpu NVIDIA_A100-SXM4-80GB mem=81920 uuid=GPU-11111111-aaaa proc=OWN:70000
gpu NVIDIA_A100-SXM4-80GB mem=81920 uuid=GPU-22222222-bbbb {processes}
"""
CASES = {
    "its own process among others": (TWO_GPUS.format(processes="proc=OWN:30500 proc=4000002:900"), 30500 * MIB),
    "alone in a container": (TWO_GPUS.format(processes="proc=4000002:30500"), 30500 * MIB),
    "beside others in a container": (TWO_GPUS.format(processes="proc=4000002:30500 proc=4000003:900"), None),
    "memory unknown to the driver": (TWO_GPUS.format(processes="proc=OWN"), None),
    "processes unknown to the driver": (TWO_GPUS.format(processes="na=procs"), None),
    "another GPU": (TWO_GPUS.replace("2222", "3333").format(processes="proc=OWN:30500"), None),
    "the driver does not start": ("init 18\n", None),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int | None]:
    machines = [machine for machine, _ in CASES.values()]
    done = NvmlStandin.build(tmp_path_factory.mktemp("nvml")).python(machines[0], "-c", ASK, *machines)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_memory_on_the_gpu_is_that_of_this_process_or_not_given(case: str, answers: dict[str, int | None]) -> None:
    """Issue 3, calibration: a figure is what nvidia-smi shows of this process on this GPU; nothing is guessed."""
    assert answers[case] == CASES[case][1]

"""What torch says of itself and of CUDA, asked in a process of its own: it may hang, crash, or not be there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from trainwright.doctor.lines import shown

TIMEOUT_S: Final = 120
_ASK: Final = """
import json, warnings
said = []
warnings.showwarning = lambda message, *rest: said.append(str(message))
import torch
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available(),
         "devices": [], "architectures": torch.cuda.get_arch_list() if torch.version.cuda else []}
if facts["available"]:
    count = torch.cuda.device_count()
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        reach = [peer for peer in range(count) if peer != index and torch.cuda.can_device_access_peer(index, peer)]
        facts["devices"].append(
            {"name": torch.cuda.get_device_name(index), "capability": [major, minor], "peers": reach}
        )
    facts["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
try:
    import accelerate
    facts["accelerate"] = accelerate.__version__
except ImportError as error:
    facts["accelerate_error"] = str(error)
facts["warnings"] = said
print(json.dumps(facts))
"""


def ask_torch() -> Mapping[str, Any]:
    """Return the facts; where torch cannot be asked, `error` alone says why."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"torch does not answer within {TIMEOUT_S} s: a GPU or its driver may hang"}
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        return {"error": shown(last[0]) if last else f"it ended with exit status {done.returncode}"}
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts

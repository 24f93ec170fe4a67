"""What torch sees of the GPUs, as one line of JSON: `python -m trainwright.evaluate.workers.probe`."""

from __future__ import annotations

import json

import torch

if __name__ == "__main__":
    available = torch.cuda.is_available()
    devices = torch.cuda.device_count() if available else 0
    print(
        json.dumps({"available": available, "devices": devices, "torch": torch.__version__, "cuda": torch.version.cuda})
    )

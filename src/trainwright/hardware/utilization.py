"""How busy GPUs are at this moment (NVML): the share of the last sample period in which a kernel ran, in percent."""

from __future__ import annotations

from collections.abc import Sequence

import pynvml


def utilization_pct(names: Sequence[str]) -> dict[str, int]:
    """Return the utilization of GPUs named as in CUDA_VISIBLE_DEVICES; those that cannot be read are left out.

    A MIG instance has none of its own (nvml.h, nvmlDeviceGetUtilizationRates).
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    by_name = {}
    try:
        for name in names:
            try:
                by_index = name.isdecimal()
                handle = (
                    pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(name)
                )
                by_name[name] = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            except pynvml.NVMLError:
                continue
    finally:
        pynvml.nvmlShutdown()
    return by_name

"""Faults of the storage, for the ranks of a run that has this folder on PYTHONPATH: FAULT=kind, FAULT_RANK=rank.

fsync-once    the first fsync of a checkpoint's file fails with EIO
fsync         every one does
shard         writing tensors fails with EROFS
small-files   no file may grow over 20 KB (EFBIG): a full disk for a user who may not mount a small one
no-room       the disk says that 1,000 bytes are free
"""

import errno
import os
import shutil
from pathlib import Path


def _failing_fsync(times: float):
    real, left = os.fsync, [times]

    def fsync(fd: int) -> None:
        if ".staging-checkpoint-" in str(Path(f"/proc/self/fd/{fd}").readlink()) and left[0] > 0:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    return fsync


def _refuse_tensors(tensors, path, metadata=None):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def _install(kind: str) -> None:
    if kind in ("fsync", "fsync-once"):
        os.fsync = _failing_fsync(1 if kind == "fsync-once" else float("inf"))
    elif kind == "shard":
        import safetensors.torch

        safetensors.torch.save_file = _refuse_tensors
    elif kind == "small-files":
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    elif kind == "no-room":
        shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1_000_000, 999_000, 1_000)
    else:
        raise ValueError(kind)


if os.environ.get("RANK") == os.environ.get("FAULT_RANK", "0"):
    _install(os.environ["FAULT"])

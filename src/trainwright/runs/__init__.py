"""The run folder: paths, identity, lock, records and checkpoints; knows nothing of torch."""

from __future__ import annotations

from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.storage import free_bytes, require_free_space, retry_storage

__all__ = ["RunFolder", "RunLock", "free_bytes", "require_free_space", "retry_storage"]

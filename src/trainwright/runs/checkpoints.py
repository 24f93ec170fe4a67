"""Checkpoints as the rest of the tool sees them; see manifest, commit and retention for the parts."""

from __future__ import annotations

from trainwright.runs.commit import commit, discard_staging, open_staging
from trainwright.runs.manifest import CorruptCheckpoint, FileDigest, Manifest, read_manifest, seal_file, verify
from trainwright.runs.retention import Skipped, newest_valid, retain, sweep

__all__ = [
    "CorruptCheckpoint",
    "FileDigest",
    "Manifest",
    "Skipped",
    "commit",
    "discard_staging",
    "newest_valid",
    "open_staging",
    "read_manifest",
    "retain",
    "seal_file",
    "sweep",
    "verify",
]

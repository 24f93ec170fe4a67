"""How long before its time limit a job is told to stop: enough for a save, and a small share of the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainwright.errors import UserError

USUAL_S: Final = 180
LARGEST_SHARE: Final = 0.25
"""The lead is at most this share of the limit, unless a save takes longer."""
EARLY_S: Final = 60
"""Slurm may send the signal up to a minute before the time that it was asked for (sbatch, --signal)."""
DISK_BYTES_S: Final = 200e6
"""What a node writes to a shared file system in a second, where no save was measured: a low assumption."""
STEP_S: Final = 10.0
"""How long the step under way takes, where none was measured: an assumption."""
ENDING_S: Final = 10.0
SAVE_MARGIN: Final = 1.5


@dataclass(frozen=True, kw_only=True)
class SaveTime:
    """What the step under way and a save take, in seconds, and whether that was measured or is an estimate."""

    step_s: float
    save_s: float
    source: str

    @property
    def needed_s(self) -> float:
        """How long before the limit the run has to hear of it."""
        return self.step_s + SAVE_MARGIN * self.save_s + ENDING_S

    @classmethod
    def estimate(cls, checkpoint_bytes: int, nodes: int) -> SaveTime:
        """Return the estimate for a checkpoint that `nodes` write together."""
        save_s = checkpoint_bytes / (DISK_BYTES_S * nodes)
        source = f"estimate: {checkpoint_bytes / 2**30:.2f} GiB at {DISK_BYTES_S * nodes / 1e6:.0f} MB/s"
        return cls(step_s=STEP_S, save_s=save_s, source=source)


@dataclass(frozen=True, kw_only=True)
class StopLead:
    """How many seconds before the time limit the stop signal is asked for, and why; `warning` where that is tight."""

    seconds: int = USUAL_S
    reason: str = "usual"
    warning: str | None = None

    def __str__(self) -> str:
        return f"{self.seconds} s before the time limit ({self.reason})"


def stop_lead(time_limit_min: int, save: SaveTime | None) -> StopLead:
    """Return the lead for a time limit; `save` is None where nothing is known of it.

    Raises:
        UserError: the signal might come as the job begins, so that it would never train.
    """
    limit_s = 60 * time_limit_min
    share_s = LARGEST_SHARE * limit_s
    seconds = int(min(USUAL_S, share_s))
    reason = "usual" if seconds == USUAL_S else f"{LARGEST_SHARE:.0%} of the limit"
    takes = ""
    if save is not None and save.needed_s > seconds:
        seconds = int(save.needed_s) + 1
        reason = f"a step and a save take up to {save.needed_s:.0f} s; {save.source}"
        takes = f" to save ({save.source})"
    left_s = limit_s - seconds - EARLY_S
    if left_s <= 0:
        raise UserError(
            f"a time limit of {time_limit_min} min leaves nothing to train: the run has to stop {seconds} s before "
            f"it{takes}, and Slurm may say so {EARLY_S} s early",
            hints=[f"--time {2 * (seconds + EARLY_S) // 60 + 1} (minutes), or more"],
        )
    warning = None
    if left_s < limit_s / 2:
        warning = (
            f"of the {time_limit_min} min of the time limit as little as {left_s} s may be left to start and to "
            f"train, as the run has to stop {seconds} s before it and Slurm may say so {EARLY_S} s early"
        )
    return StopLead(seconds=seconds, reason=reason, warning=warning)

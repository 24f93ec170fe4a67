"""The time of a training step and of a run, without a GPU: a roofline by kernel class, communication, the update."""

from trainwright.estimate.time.bars import busy_bars, pace_bars
from trainwright.estimate.time.run import RunTime, run_time
from trainwright.estimate.time.step import step_time, why_not

__all__ = ["RunTime", "busy_bars", "pace_bars", "run_time", "step_time", "why_not"]

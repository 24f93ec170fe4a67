"""Mixed GPUs: the slowest sets the pace, and the bars say so (S0-08 to S0-10, S0-18)."""

from __future__ import annotations

import pytest
from steps_in_time import samples_a_second, step

from trainwright.estimate.time import pace_bars

MIXED = "a100-80gb:2,v100-32gb:2"
HALF = {"precision": "fp16", "weights": "fp16"}


def test_the_slowest_gpu_sets_the_pace() -> None:
    """S0-09: a mixed set is worth its slowest GPU times its number."""
    mixed, slowest = samples_a_second(MIXED, **HALF), samples_a_second("v100-32gb", **HALF)
    assert mixed <= 4 * slowest
    assert mixed == pytest.approx(4 * slowest, rel=0.35)
    assert mixed < samples_a_second("a100-80gb:4", **HALF)


def test_each_rank_has_its_own_time_before_it_waits() -> None:
    """S0-08: A100s finish early; both of a kind are alike."""
    a100_0, a100_1, v100_0, v100_1 = step(MIXED, **HALF).ranks_s
    assert a100_0 == a100_1 < v100_0 == v100_1
    assert step(MIXED, **HALF).step_s >= v100_0


def test_the_bars_name_the_bottleneck_and_who_waits() -> None:
    """S0-08, S0-09: a bar for each GPU, `bottleneck` at the slowest, and why all wait."""
    names = ["A100-80GB", "A100-80GB", "V100-32GB", "V100-32GB"]
    *bars, reason = pace_bars(step(MIXED, **HALF), names)
    assert [bar.split()[0] for bar in bars] == names
    assert all("100%" in bar and "waits" in bar for bar in bars[:2])
    assert all("bottleneck" in bar and "100%" not in bar for bar in bars[2:])
    assert bars[0].count("#") > bars[2].count("#")
    assert "all GPUs must synchronise" in reason and "slowest x 4" in reason
    assert all(line.isascii() for line in [*bars, reason])


def test_equal_gpus_have_equal_bars_and_no_bottleneck() -> None:
    bars = pace_bars(step("a100-80gb:2"), ["A100", "A100"])
    assert len(bars) == 2
    assert not any("bottleneck" in bar or "waits" in bar for bar in bars)

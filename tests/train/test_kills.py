"""A run can be killed at any moment and ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from disturbed_runs import SAVE_EVERY_STEPS, Trials


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long), pytest.param("single", marks=pytest.mark.long)]
)
def test_a_run_killed_at_random_moments_ends_with_the_weights_of_one_left_alone(strategy: str, tmp_path: Path) -> None:
    """C01, S10, G1 to G4: all ranks are killed four times, twice in the middle of a save; nobody does anything."""
    outcome = Trials(tmp_path, strategy, epochs=12, seed=1).kill_ranks(4, mid_saves=2)
    assert outcome.same_weights
    assert outcome.same_losses
    assert outcome.each_sample_once_an_epoch
    assert outcome.mid_save >= 2
    assert outcome.most_lost_steps <= SAVE_EVERY_STEPS

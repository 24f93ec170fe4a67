"""A run can be killed at any moment and ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from disturbed_runs import SAVE_EVERY_STEPS, STRATEGIES, Trials


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_killed_at_random_moments_ends_with_the_weights_of_one_left_alone(strategy: str, tmp_path: Path) -> None:
    """C01, S10, G1 to G4: all ranks are killed four times, twice in the middle of a save; nobody does anything."""
    outcome = Trials(tmp_path, strategy, epochs=12, seed=1).kill_ranks(4, mid_saves=2)
    assert outcome.same_weights
    assert outcome.same_losses
    assert outcome.each_sample_once_an_epoch
    assert outcome.mid_save >= 2
    assert outcome.most_lost_steps <= SAVE_EVERY_STEPS


def test_the_same_command_goes_on_after_the_launcher_itself_was_killed(tmp_path: Path) -> None:
    """C01, S09: the launcher is killed twice, once during a save; its ranks die with it."""
    outcome = Trials(tmp_path, "single", epochs=12, seed=1).kill_launcher(2, mid_saves=1)
    assert outcome.same_weights
    assert outcome.same_losses
    assert outcome.each_sample_once_an_epoch
    assert outcome.mid_save >= 1
    assert outcome.slowest_to_vanish_s <= 10

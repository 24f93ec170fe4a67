"""What the multi-GPU guide claims for its own job on one node (S1-28): shown beside what is measured, never used."""

from __future__ import annotations

from dataclasses import dataclass

SAID_OF = "claims are the multi-GPU guide's, for its own job on one node, 4 samples a GPU (weak scaling)"


@dataclass(frozen=True)
class SpeedupClaim:
    """A speed-up over one GPU, and the per cent that are lost, each as a range."""

    speed_up: tuple[float, float]
    overhead_pct: tuple[float, float]

    def __str__(self) -> str:
        return "{}-{}x, {:g}-{:g} % lost".format(*self.speed_up, *self.overhead_pct)


CLAIMS = {
    1: SpeedupClaim((1.0, 1.0), (0, 0)),
    2: SpeedupClaim((1.8, 1.9), (5, 10)),
    4: SpeedupClaim((3.5, 3.8), (5, 12)),
    8: SpeedupClaim((6.5, 7.0), (12, 18)),
}
"""By number of GPUs. Of the speed-ups follow 5-10, 5-12.5 and 12.5-18.75 % (S1-29): the guide cuts the rest off."""

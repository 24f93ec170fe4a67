"""What the multi-GPU guide claims of numbers of GPUs (S1-28): shown as a claim beside what runs measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Claim:
    """Speed-up over one GPU and the share that is lost, as the guide has them."""

    speed_up: str
    lost: str

    def __str__(self) -> str:
        return f"{self.speed_up}, {self.lost} lost"


BY_GPUS: Final = {
    2: Claim("1.8-1.9x", "5-10 %"),
    4: Claim("3.5-3.8x", "5-12 %"),
    8: Claim("6.5-7.0x", "12-18 %"),
}

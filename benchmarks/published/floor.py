"""What a training step must hold whatever it does: a request that exceeds the card by this alone is not traced."""

from __future__ import annotations

from trainwright.anatomy import anatomy, read_config
from trainwright.estimate.request import Request

WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
PACKED_BYTES = 0.5
"""Of a 4-bit weight, without its scales."""


def least_bytes(request: Request) -> int:
    """Return a lower bound of what one rank holds on its GPU, in bytes.

    The weights; in full training a gradient and two moments of their dtype beside each. All are divided by the number
    of ranks where a strategy shards any of them, and nothing is left where they go to host memory.
    """
    if request.offload != "none":
        return 0
    width = WEIGHT_BYTES[request.base_dtype]
    each = {"full": 4 * width, "lora": width, "qlora": PACKED_BYTES}[request.method.type]
    shards = 1 if request.strategy in ("single", "ddp") else request.world_size
    dimensions = {name: value for name, value in request.config.items() if name != "quantization_config"}
    return int(anatomy(read_config(dimensions)).parameter_count * each / shards)

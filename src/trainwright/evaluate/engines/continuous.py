"""transformers' continuous batching: keys and values in pages, and a prompt that ends makes room for the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers


def why_not_continuous(model: Any) -> str | None:
    """Return why batches are static for this model where it stands, or None: they can be continuous."""
    if not (hasattr(model, "generate_batch") and hasattr(transformers, "ContinuousBatchingConfig")):
        return f"transformers {transformers.__version__} has no continuous ones"
    if model.device.type != "cuda":
        # benchmarks/evaluate_batching.py measures both.
        return "on a processor continuous ones are slower" if model.device.type == "cpu" else "no CUDA"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "its layers are spread over several GPUs"
    if not getattr(model, "_supports_flash_attn", False):
        return "its attention does not read keys and values in pages"
    return None


def generate_continuously(
    model: Any, prompts: Sequence[list[int]], generation_config: Any, **limits: int
) -> list[tuple[list[int], float]] | None:
    """Return the new tokens of each prompt and the logarithm of the first one's probability; None where it failed.

    `limits` are `num_blocks` and `max_batch_tokens`; without them it takes what memory is free.
    """
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig(
        return_logprobs=True,
        use_cuda_graph=False,  # captured anew in each call, which lasts no longer than one step of the policy
        auto_switch_to_flash=False,  # would fetch kernels from the hub
        **limits,
    )
    outputs = model.generate_batch(
        list(prompts), generation_config=generation_config, continuous_batching_config=config, warmup=False
    )
    # A request that failed, of memory too, is logged and left out.
    if len(outputs) < len(prompts) or any(output.error for output in outputs.values()):
        return None
    return [(output.generated_tokens, output.logprobs[0]) for output in outputs.values()]

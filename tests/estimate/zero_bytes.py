"""One rank of a two-process gloo group: what DeepSpeed really holds after two steps, as JSON from rank 0."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from gloo import joined
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trainwright.train.strategies.zero import import_deepspeed


def main() -> None:
    """Train two steps under each stage."""
    config, stages = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    with joined() as rank:
        found = {str(stage): held(config, stage) for stage in stages}
        if rank == 0:
            print(json.dumps(found))


def held(config: dict[str, Any], stage: int) -> dict[str, int]:
    """Bytes of weights in bf16, of fp32 weights and of moments on this rank."""
    deepspeed = import_deepspeed()
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(config))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others}], lr=1e-4)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "reduce_bucket_size": 1_000_000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    zero = engine.optimizer
    if stage == 3:
        weights = [p.ds_tensor for p in engine.module.parameters()]
        masters = list(zero.fp32_partitioned_groups_flat)
    else:
        weights, masters = list(zero.bit16_groups_flat), list(zero.single_partition_of_fp32_groups)
    moments = [t for m in masters for t in zero.optimizer.state[m].values() if torch.is_tensor(t) and t.ndim]
    return {
        "weights": _bytes(weights),
        "masters": _bytes(masters),
        "moments": _bytes(moments),
    }


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    main()

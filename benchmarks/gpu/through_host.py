"""FSDP2's reduce-scatter for ranks that share one GPU, with the memory that NCCL would take."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


class ThroughHost:
    """Gloo clones the input on the GPU, which NCCL does not; here it is copied to the host and added up there."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the buffer as FSDP2 does by default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce and scatter; done when this returns, whatever `async_op` says."""
        part = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        dist.reduce_scatter_tensor(part, input_tensor.cpu(), op=op, group=group)
        output_tensor.copy_(part)


def reduce_scatter(model: nn.Module) -> None:
    """Let every unit of a sharded model reduce its gradients through the host."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(ThroughHost())

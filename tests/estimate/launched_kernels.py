"""The kernels that a traced step launches, and the bytes that those between the products move; a script.

    python launched_kernels.py REQUESTS.json

prints a list of `{"forward": [kernels, bytes], "backward": [kernels, bytes]}`. Counted are the operators of torch that
neither give a view nor only take memory: each is one kernel on CUDA, but for a few such as a sort. The stand-ins of
packed weights take memory and unpack nothing.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainwright.estimate.request import Request
from trainwright.estimate.trace import run as traced
from trainwright.estimate.trace.tracker import Tracker

ONLY_MEMORY = ("empty", "new_empty", "detach", "resize_", "set_", "record_stream", "_local_scalar_dense")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


class KernelCounter(Tracker):
    """Counts what the second step runs, by phase."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kernels: Counter[str] = Counter()
        self.moved_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        operators = self.operators
        result = super().__torch_dispatch__(func, types, args, kwargs)
        library, _, name = func._schema.name.partition("::")
        inputs, outputs = _tensors(args), _tensors(result)
        if library != "aten" or Tracker._paused or self.phase.step != traced.STEPS or not inputs + outputs:
            return result
        own = {tensor.untyped_storage()._cdata for tensor in inputs}
        in_place = func._schema.is_mutable or self.operators == operators  # sums of gradients, as autograd's engine has
        view = outputs and not in_place and all(tensor.untyped_storage()._cdata in own for tensor in outputs)
        if not view and not name.startswith(ONLY_MEMORY):
            self.kernels[self.phase.name] += 1
            if name not in PRODUCTS and "scaled_dot_product" not in name:
                self.moved_bytes[self.phase.name] += sum(map(_bytes, inputs + outputs))
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.device.type == "cuda"]


def _bytes(tensor: torch.Tensor) -> int:
    """Of what really lies in memory: an expanded dimension is read again from the cache."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def main() -> None:
    """Trace each request of the file."""
    traced.Tracker = KernelCounter  # type: ignore[misc]
    found = []
    for data in json.loads(Path(sys.argv[1]).read_text()):
        counter = traced.trace(Request.parse(data)).tracker
        assert isinstance(counter, KernelCounter)
        found.append({phase: [counter.kernels[phase], counter.moved_bytes[phase]] for phase in ("forward", "backward")})
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""How the ranks of a layout lie on machines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from trainwright.errors import UserError
from trainwright.plan.choose import Plan
from trainwright.plan.layout import Layout


@dataclass(frozen=True)
class Nodes:
    """A number of machines, and of ranks (one a GPU) on each of them; all machines are alike."""

    count: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.ranks_per_node < 1:
            raise UserError(f"{self.count} nodes of {self.ranks_per_node} ranks: both must be 1 or more")

    @classmethod
    def of(cls, plan: Plan) -> Nodes:
        """Return the nodes that the plan's devices lie on; ranks without a GPU each are on one.

        Raises:
            UserError: not the same number of devices on each: torchrun starts as many ranks on one node as on another.
        """
        if len(plan.devices) != plan.layout.ranks:
            return cls(1, plan.layout.ranks)
        sizes = Counter(device.node for device in plan.devices)
        if len(set(sizes.values())) > 1:
            counts = " + ".join(str(size) for _, size in sorted(sizes.items()))
            raise UserError(
                f"the plan's GPUs are {counts} on {len(sizes)} nodes, and torchrun starts as many ranks on each node",
                hints=["plan for nodes that are alike: --gpus MODEL:GPUSxNODES"],
            )
        return cls(len(sizes), plan.layout.ranks // len(sizes))

    def require(self, layout: Layout) -> None:
        """Raise UserError unless nodes x ranks per node are the ranks of the layout, with a GPU for each (S1-15)."""
        product = self.count * self.ranks_per_node
        visible = None if layout.visible_devices is None else len(layout.visible_devices.split(","))
        problems = []
        if product != layout.ranks:
            problems.append(
                f"nodes x ranks per node = {self.count} x {self.ranks_per_node} = {product}, "
                f"but the plan has {layout.ranks} ranks"
            )
        if visible not in (None, self.ranks_per_node):
            problems.append(f"the plan names {visible} GPUs on each node, for {self.ranks_per_node} ranks")
        if problems:
            spec = f"MODEL:{self.ranks_per_node}x{self.count}"
            raise UserError(
                "the nodes are not those of the plan",
                problems=problems,
                hints=[f"plan for {self.count} nodes with {self.ranks_per_node} GPUs each: --gpus {spec}"],
            )

"""DeepSpeed ZeRO-1, 2 and 3, through DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainwright.errors import not_installed
from trainwright.job.schema import TrainSection
from trainwright.train.optimizers import build_optimizer, set_learning_rate
from trainwright.train.precision import COMPUTE_DTYPES
from trainwright.train.strategies.handing_out import hand_out
from trainwright.train.strategies.replicated import is_quantized
from trainwright.train.strategies.states import saved_tensors, stored_name, trained_parameters
from trainwright.train.tensors import TensorReader

MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero:
    """A DeepSpeed engine; `config` is what stands in launcher/deepspeed.json."""

    passes_are_collective = True

    def __init__(self, model: nn.Module, train: TrainSection, *, device: torch.device, config: dict[str, Any]) -> None:
        deepspeed = import_deepspeed()
        self._stage = int(config["zero_optimization"]["stage"])
        self.name = f"zero{self._stage}"
        self._adapters_only = hasattr(model, "peft_config")
        self._world_size, self._rank = dist.get_world_size(), dist.get_rank()
        if not is_quantized(model):
            hand_out(model, device, dtype=_dtype_of(config), take=_taking(deepspeed, config))
        optimizer = build_optimizer(model, train)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        self.forward: nn.Module = self._engine
        self.module: nn.Module = self._engine.module
        self._zero = self._engine.optimizer

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Tell the engine where the global batch ends; it may be shorter than its own count of micro-steps."""
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate; the engine averages over ranks, so the share is multiplied by the world size first."""
        self._engine.backward(loss * self._world_size, scale_wrt_gas=False)

    def step(self, learning_rate: float, max_grad_norm: float) -> float:
        """Update; the engine clips to the norm in its config, which is the job's."""
        set_learning_rate(self._zero.optimizer, learning_rate)
        for group in self._zero.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        if getattr(self._zero, "overflow", False):
            return float("inf")
        return float(self._engine.get_global_grad_norm())

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Assemble one tensor after the other: the fp32 copy of trained parameters, the others as they are."""
        deepspeed = import_deepspeed()
        from deepspeed.utils import safe_get_full_fp32_param

        for name, tensor in saved_tensors(self.module, adapters_only=self._adapters_only):
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                yield stored_name(name), safe_get_full_fp32_param(tensor)
            elif hasattr(tensor, "ds_id"):
                with deepspeed.zero.GatheredParameters([tensor]):
                    yield stored_name(name), tensor.detach().clone()
            else:
                yield stored_name(name), tensor

    def gather_optimizer(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Assemble one moment after the other."""
        from deepspeed.utils import safe_get_full_optimizer_state

        states = [self._zero.optimizer.state.get(flat) for flat in self._flat_partitions()]
        step = next((torch.as_tensor(state["step"]) for state in states if state), None)
        if step is None:
            return
        self._link_moments()
        for name, parameter in trained_parameters(self.module):
            yield f"{stored_name(name)}.step", step.to(torch.float32)
            for key in MOMENTS:
                yield f"{stored_name(name)}.{key}", safe_get_full_optimizer_state(parameter, key)

    def load_weights(self, reader: TensorReader) -> None:
        """Set the fp32 copies and the parameters themselves."""
        with torch.no_grad():
            for name, tensor in saved_tensors(self.module, adapters_only=self._adapters_only):
                value = reader.whole(stored_name(name)).to(tensor.device)
                trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
                if hasattr(tensor, "ds_id"):
                    tensor.ds_tensor.copy_(self._own_part(tensor, value))
                else:
                    tensor.copy_(value)
                if trained:
                    self._set_fp32(tensor, value, key=None)

    def load_optimizer(self, reader: TensorReader) -> None:
        """Set the moments, after making room for them: the engine itself does so in its first step only."""
        named = [(stored_name(name), parameter) for name, parameter in trained_parameters(self.module)]
        if f"{named[0][0]}.step" not in reader.names:
            return
        step = reader.whole(f"{named[0][0]}.step")
        for flat in self._flat_partitions():
            # A step tensor each: shared by several groups it would be counted up once for each of them.
            moments = {key: torch.zeros_like(flat) for key in MOMENTS}
            self._zero.optimizer.state[flat] = {"step": step.clone().to(flat.device), **moments}
        self._link_moments()
        for name, parameter in named:
            for key in MOMENTS:
                self._set_fp32(parameter, reader.whole(f"{name}.{key}").to(parameter.device), key=key)

    def scalars(self) -> dict[str, float]:
        """Return the state of DeepSpeed's loss scaler."""
        scaler = getattr(self._zero, "loss_scaler", None)
        if not getattr(scaler, "dynamic", False):
            return {}
        return {key: float(getattr(scaler, key)) for key in ("cur_scale", "cur_iter", "last_overflow_iter")}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Take the state of the loss scaler back."""
        if "cur_scale" in scalars and getattr(self._zero.loss_scaler, "dynamic", False):
            self._zero.loss_scaler.cur_scale = scalars["cur_scale"]
            self._zero.loss_scaler.cur_iter = int(scalars["cur_iter"])
            self._zero.loss_scaler.last_overflow_iter = int(scalars["last_overflow_iter"])

    def found(self) -> dict[str, str]:
        """Return what really runs."""
        return {"strategy": f"zero{self._engine.zero_optimization_stage()}"}

    def _flat_partitions(self) -> list[torch.Tensor]:
        if self._stage < 3:
            return list(self._zero.single_partition_of_fp32_groups)
        return list(self._zero.fp32_partitioned_groups_flat)

    def _link_moments(self) -> None:
        """Let DeepSpeed's per-parameter access see the moments; it links once, before they exist (0.19.8)."""
        if self._stage < 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _own_part(self, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        size = parameter.ds_tensor.numel()
        padded = nn.functional.pad(value.flatten(), (0, size * self._world_size - value.numel()))
        return padded.narrow(0, size * self._rank, size)

    def _set_fp32(self, parameter: Any, value: torch.Tensor, *, key: str | None) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if hasattr(parameter, "ds_id"):
            # Not set_full: it narrows past the end where the size does not divide by the ranks (DeepSpeed 0.19.8).
            self._zero.set_local_hp_param(self._own_part(parameter, value), parameter, key)
        elif key is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)


def _dtype_of(config: dict[str, Any]) -> torch.dtype:
    """Return the dtype that the engine would turn parameters into."""
    enabled = (name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled"))
    return COMPUTE_DTYPES[next(enabled, "fp32")]


def _taking(deepspeed: Any, config: dict[str, Any]) -> Callable[[nn.Parameter], None]:
    """Return how a parameter of rank 0 comes to the others: whole, or under ZeRO-3 to each its part of it."""
    if config["zero_optimization"]["stage"] < 3:
        return lambda parameter: dist.broadcast(parameter.data, src=0)
    deepspeed.init_distributed(dist_init_required=False)  # DeepSpeed's own view of the group that is open

    before: list[Any] = []

    def partition(parameter: nn.Parameter) -> None:
        # As the engine partitions a module that is whole on every rank, which it does from rank 0 as well.
        if before:
            before[0].convert_to_zero_parameters(param_list=[parameter])
        else:
            deepspeed.zero.Init(module=nn.ParameterList([parameter]), config_dict_or_path=config)
            before.append(parameter)

    return partition


def import_deepspeed() -> Any:
    """Return the deepspeed module, without its shared-memory extension, which a CPU run would compile for a minute.

    Raises:
        UserError: DeepSpeed is not installed.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise not_installed("ZeRO", "deepspeed", extra="deepspeed", instead="resources.strategy=fsdp2") from error
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed

"""accelerate's configuration file, for scripts that build an `Accelerator`, transformers' Trainer among them.

Keys and values as `accelerate config` writes them since 1.6, the first release with FSDP2's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainwright.launch.files.nodes import Nodes
from trainwright.plan.layout import Layout

SINGLE_NODE = "accelerate_config_single_node.yaml"
MULTI_NODE = "accelerate_config_multi_node.yaml"


def accelerate_yaml(layout: Layout, nodes: Nodes, deepspeed_json: Path) -> str:
    """Return the file; `deepspeed_json` is the path that accelerate is to read DeepSpeed's part from, under ZeRO."""
    lines = [f"# {line}" for line in _remarks(layout, nodes)]
    for key, value in accelerate_keys(layout, nodes, deepspeed_json).items():
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {name}: {_scalar(inner)}" for name, inner in value.items())]
        else:
            lines.append(f"{key}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def accelerate_keys(layout: Layout, nodes: Nodes, deepspeed_json: Path) -> dict[str, Any]:
    """Return the keys of the file with their values.

    Raises:
        UserError: nodes and layout do not go together.
    """
    nodes.require(layout)
    several = nodes.count > 1
    keys: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": _distributed_type(layout),
        "enable_cpu_affinity": False,
        "gpu_ids": _gpu_ids(layout, nodes),
        "machine_rank": 0,
        # 0 takes a free port, so that two runs on one machine do not meet; several machines must agree on one.
        "main_process_port": 29500 if several else 0,
        "main_training_function": "main",
        "num_machines": nodes.count,
        "num_processes": layout.ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": layout.device == "cpu",
    }
    if layout.strategy.startswith("zero"):
        # Without mixed_precision: DeepSpeed's file says it, and accelerate refuses to be told in both.
        keys["deepspeed_config"] = {
            "deepspeed_config_file": str(deepspeed_json),
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": layout.strategy == "zero3",
        }
        return keys
    keys["mixed_precision"] = "no" if layout.precision == "fp32" else layout.precision
    if layout.strategy == "fsdp2":
        keys["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_activation_checkpointing": layout.gradient_checkpointing,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": False,
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    return keys


def accelerate_environment(layout: Layout, nodes: Nodes, deepspeed_json: Path) -> dict[str, str]:
    """Return what `accelerate launch` would put into the environment of its ranks, for ranks that torchrun starts."""
    keys = accelerate_keys(layout, nodes, deepspeed_json)
    environment = {"ACCELERATE_USE_CPU": str(keys["use_cpu"]).lower()}
    if "mixed_precision" in keys:
        environment["ACCELERATE_MIXED_PRECISION"] = keys["mixed_precision"]
    if "fsdp_config" in keys:
        told = {name.upper(): _variable(value) for name, value in keys["fsdp_config"].items()}
        environment |= {"ACCELERATE_USE_FSDP": "true", **told}
    if "deepspeed_config" in keys:
        environment |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": keys["deepspeed_config"]["deepspeed_config_file"],
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": _variable(keys["deepspeed_config"]["zero3_init_flag"]),
        }
    return environment


def _variable(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _distributed_type(layout: Layout) -> str:
    if layout.strategy.startswith("zero"):
        return "DEEPSPEED"
    if layout.strategy == "fsdp2":
        return "FSDP"
    # Also on the CPU: MULTI_CPU starts one process unless MPI starts the others (accelerate 1.15, launch_command).
    return "NO" if layout.ranks == 1 else "MULTI_GPU"


def _gpu_ids(layout: Layout, nodes: Nodes) -> str:
    """Return the devices by name only where they are not simply the first ones.

    accelerate would put them in place of a CUDA_VISIBLE_DEVICES that the user sets before the command (S1-11).
    """
    names = layout.visible_devices
    first = ",".join(str(index) for index in range(nodes.ranks_per_node))
    return "all" if names in (None, first) else str(names)


def _remarks(layout: Layout, nodes: Nodes) -> list[str]:
    variable = "ACCELERATE_USE_CPU=true " if layout.device == "cpu" else ""
    if nodes.count == 1:
        remarks = [f"{variable}accelerate launch --config_file {SINGLE_NODE} train.py"]
    else:
        remarks = [
            "On each node, with its own number and the address of node 0:",
            f"{variable}accelerate launch --config_file {MULTI_NODE} \\",
            "  --machine_rank 0 --main_process_ip ADDRESS train.py",
        ]
    if layout.device == "cpu" and layout.ranks > 1:
        remarks.append("Without ACCELERATE_USE_CPU each process would take itself for the only one (accelerate 1.15).")
        if layout.strategy != "ddp":
            remarks.append(
                f"accelerate does no {layout.strategy} on the CPU: there each process holds the whole model."
            )
    return remarks


def _scalar(value: str | int | bool) -> str:
    # JSON's scalars mean the same in YAML 1.1 and 1.2; a bare `no` would be false to accelerate's reader.
    return json.dumps(value, ensure_ascii=False)

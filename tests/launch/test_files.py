"""What `plan --write` leaves: each file is read by the library that it is for, and starts real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright.errors import UserError
from trainwright.hardware.inventory import Device, parse_inventory
from trainwright.job.schema import Job
from trainwright.launch.files import Nodes, write_files
from trainwright.plan.choose import Plan, choose

OWN_SCRIPT = Path(__file__).with_name("own_script.py")
TOOLS = Path(sys.executable).parent
HOSTILE = 'a plan\'s $(touch pwned) `touch pwned`; "x" & #'
"""A folder name that no shell may take for anything else."""

TINY_LLAMA = {
    "architecture": "llama",
    "dimensions": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
    },
}


def planned(gpus: str, strategy: str = "auto", **sections: Any) -> tuple[Job, Plan]:
    """Plan a job on GPUs that are only written down, or on `cpu` with two ranks."""
    resources = {"strategy": strategy, **sections.pop("resources", {})}
    if gpus == "cpu":
        devices: tuple[Device, ...] = (Device(kind="cpu", name="a processor"),)
        resources |= {"device": "cpu", "ranks": 2, "precision": "fp32"}
    else:
        devices = parse_inventory(gpus).devices
    values = {"name": "x", "model": {"name": "org/model"}, "data": {"path": "d.jsonl"}, "resources": resources}
    return choose(Job.model_validate(values | sections), {"train.global_batch_size"}, devices)


def cluster_config(path: Path) -> Any:
    """Read the file as `accelerate launch` does."""
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(str(path))


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with the tools first on PATH and nothing that a launcher has set."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "ACCELERATE_", "SLURM_"))}
    path = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}


def run(command: list[str | Path], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` to its end, which must be a good one."""
    done = subprocess.run(command, cwd=folder, env=environment(**variables), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done


@pytest.mark.parametrize(
    "gpus, strategy, name, machines, processes, kind",
    [
        ("rtx-3090:1", "auto", "accelerate_config_single_node.yaml", 1, 1, "NO"),
        ("a100-80gb:2", "ddp", "accelerate_config_single_node.yaml", 1, 2, "MULTI_GPU"),
        ("a100-80gb:8", "fsdp2", "accelerate_config_single_node.yaml", 1, 8, "FSDP"),
        ("a100-80gb:4x2", "ddp", "accelerate_config_multi_node.yaml", 2, 8, "MULTI_GPU"),
        ("a100-80gb:4x2", "zero2", "accelerate_config_multi_node.yaml", 2, 8, "DEEPSPEED"),
    ],
)
def test_accelerate_reads_the_file_as_it_was_planned(
    tmp_path: Path, gpus: str, strategy: str, name: str, machines: int, processes: int, kind: str
) -> None:
    """S1-08, S1-14, S1-15: the names of the guide, and processes that are nodes x GPUs of a node."""
    written = write_files(tmp_path, *planned(gpus, strategy))
    assert [path.name for path in written if path.name.startswith("accelerate")] == [name]
    config = cluster_config(tmp_path / name)
    assert (config.num_machines, config.num_processes) == (machines, processes)
    assert config.distributed_type.value == kind
    # DeepSpeed's own file says the precision; accelerate refuses to be told twice.
    assert config.mixed_precision == (None if kind == "DEEPSPEED" else "bf16")


def test_a_precision_of_no_is_text_to_every_yaml_reader(tmp_path: Path) -> None:
    """A bare `no` is false in YAML 1.1, which accelerate reads."""
    write_files(tmp_path, *planned("a100-80gb:2", "ddp", resources={"precision": "fp32"}))
    path = tmp_path / "accelerate_config_single_node.yaml"
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "no"
    assert cluster_config(path).mixed_precision == "no"


def test_nodes_that_are_not_those_of_the_plan_are_refused(tmp_path: Path) -> None:
    """S1-15: num_processes = nodes x GPUs of each is checked, not trusted."""
    job, plan = planned("a100-80gb:8", "ddp")
    for nodes in (Nodes(2, 8), Nodes(2, 4), Nodes(1, 4)):
        with pytest.raises(UserError, match="the nodes are not those of the plan") as caught:
            write_files(tmp_path / "a", job, plan, nodes)
        assert str(nodes.ranks_per_node) in caught.value.render()
    with pytest.raises(UserError, match=r"4 \+ 2 on 2 nodes"):
        write_files(tmp_path / "a", *planned("a100-80gb:4x1,a100-80gb:2x1", "ddp"))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("gpus, precision", [("a100-80gb:2", "bf16"), ("v100-32gb:2", "fp16")])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_the_deepspeed_file_says_what_was_planned(
    tmp_path: Path, gpus: str, precision: str, stage: int, offload: str
) -> None:
    """S4-25 to S4-29, S0-43, X-04, T-01, T-03: all keys of the guides, with the planned stage, precision and offload.

    The file that accelerate's YAML names differs from it in the optimizer and the scheduler alone, which a script
    brings itself.
    """
    write_files(tmp_path, *planned(gpus, f"zero{stage}", resources={"offload": offload}))
    config = json.loads((tmp_path / "deepspeed.json").read_text())
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert config[key] == "auto"
    assert (config["gradient_clipping"], config["steps_per_print"]) == (1.0, 50)
    assert {name: config[name]["enabled"] for name in ("bf16", "fp16")} == {
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
    }
    assert config["optimizer"] == {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    }
    assert config["scheduler"] == {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    }
    zero = config["zero_optimization"]
    shared = {
        "stage": stage,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if offload == "optimizer":
        shared["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    only_zero3 = {
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert zero == shared | (only_zero3 if stage == 3 else {})
    named = Path(
        cluster_config(tmp_path / "accelerate_config_single_node.yaml").deepspeed_config["deepspeed_config_file"]
    )
    assert named.parent == tmp_path
    assert json.loads(named.read_text()) | {key: config[key] for key in ("optimizer", "scheduler")} == config


@pytest.mark.parametrize(
    "gpus, strategy, offload",
    [("a100-80gb:2", "zero2", "optimizer"), ("v100-32gb:2", "zero3", "optimizer+parameters")],
)
def test_deepspeed_takes_the_file_as_the_trainer_fills_it(
    tmp_path: Path, gpus: str, strategy: str, offload: str
) -> None:
    """S4-12, S4-25 to S4-29, S4-34, X-04: every `auto` is filled, and DeepSpeed reads what was planned."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    _, plan = planned(gpus, strategy, resources={"offload": offload})
    write_files(tmp_path, *planned(gpus, strategy, resources={"offload": offload}))
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        learning_rate=3e-5,
        weight_decay=0.01,
        warmup_steps=7,
        use_cpu=True,
    )
    # Set afterwards: the Trainer's own check of the precision wants the GPU that it will have.
    arguments.bf16, arguments.fp16 = plan.layout.precision == "bf16", plan.layout.precision == "fp16"
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **(TINY_LLAMA["dimensions"])))  # type: ignore[arg-type]
    filler = HfTrainerDeepSpeedConfig(str(tmp_path / "deepspeed.json"))
    filler.trainer_config_process(arguments)
    filler.trainer_config_finalize(arguments, model, 100)
    assert '"auto"' not in json.dumps(filler.config)

    config = DeepSpeedConfig(filler.config)
    zero = config.zero_config
    assert zero.stage == int(strategy[-1])
    assert (config.float16_config.enabled, config.bfloat16_config.enabled) == (arguments.fp16, arguments.bf16)
    assert zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"
    assert (zero.offload_param is not None) == (offload == "optimizer+parameters")
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (4, 8)
    assert config.optimizer_params["lr"] == 3e-5
    assert config.scheduler_params["warmup_num_steps"] == 7


def accelerate_launch(folder: Path, accumulation: int, **variables: str) -> list[dict[str, Any]]:
    """Start the user's own script with the folder's file and return what each of its two processes found."""
    config = folder / "accelerate_config_single_node.yaml"
    command: list[str | Path] = [TOOLS / "accelerate", "launch", "--config_file", config, OWN_SCRIPT]
    run([*command, str(accumulation), folder], folder, **variables)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.long
def test_accelerate_starts_two_processes_on_the_cpu(tmp_path: Path) -> None:
    """S1-10: two processes that share one model; by MULTI_CPU accelerate would start one."""
    write_files(tmp_path, *planned("cpu", "ddp"))
    assert "ACCELERATE_USE_CPU=true accelerate launch" in (tmp_path / "accelerate_config_single_node.yaml").read_text()
    for found in accelerate_launch(tmp_path, 1, ACCELERATE_USE_CPU="true"):
        assert (found["processes"], found["mixed_precision"], found["share_held"]) == (2, "no", 1)
        assert len(found["losses"]) == 8
        assert found["losses"][-1] < 0.7 * found["losses"][0]


@pytest.mark.long
def test_accelerate_shards_by_fsdp2_as_planned(tmp_path: Path) -> None:
    """S4-11: each process holds half of the weights, in the planned precision."""
    write_files(tmp_path, *planned("rtx-3090:2", "fsdp2"))
    for found in accelerate_launch(tmp_path, 2, ACCELERATE_TORCH_DEVICE="cpu"):
        assert (found["type"], found["processes"], found["mixed_precision"]) == ("FSDP", 2, "bf16")
        assert found["share_held"] == pytest.approx(0.5, abs=0.01)
        assert found["losses"][-1] < 0.9 * found["losses"][0]


def test_accelerate_really_runs_the_planned_zero_stage(tmp_path: Path) -> None:
    """T-01, T-03, S1-10: the stage, clipping and precision of the file take effect in the engine itself."""
    write_files(tmp_path, *planned("rtx-3090:2", "zero3", train={"max_grad_norm": 0.7}))
    found = accelerate_launch(tmp_path, 2, ACCELERATE_TORCH_DEVICE="cpu", DS_ACCELERATOR="cpu")
    for rank in found:
        engine = rank["deepspeed"]
        assert (rank["type"], rank["processes"], engine["stage"]) == ("DEEPSPEED", 2, 3)
        assert (engine["bf16"]["enabled"], engine["gradient_clipping"]) == (True, 0.7)
        assert (engine["train_micro_batch_size_per_gpu"], engine["train_batch_size"]) == (4, 4 * 2 * 2)
        assert rank["share_held"] == pytest.approx(0.5, abs=0.01)
        assert rank["losses"][-1] < 0.9 * rank["losses"][0]


@pytest.fixture(scope="module")
def tiny_job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The sections of a job that trains a tiny llama for 150 steps."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"question": f"Question {index}: how many?", "answer": f"There are {index}."} for index in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"from_scratch": TINY_LLAMA, "tokenizer": {"vocab_size": 400}},
        "data": {"path": str(folder / "rows.jsonl"), "max_length": 96, "cache_dir": str(folder / "cache")},
        "train": {"global_batch_size": 8, "num_train_epochs": 30.0, "learning_rate": 1e-3},
        "checkpoint": {"every": "1000 steps"},
        "tracking": [],
    }


def steps_of(run_folder: Path) -> list[dict[str, Any]]:
    """Return the training records of a run, in the order they were written."""
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


@pytest.mark.long
def test_launch_sh_trains_the_job_and_goes_on_where_it_was_stopped(tmp_path: Path, tiny_job: dict[str, Any]) -> None:
    """S4-47, S4-48: two real processes under torchrun; stopped, saved, resumed to the end, each step once.

    Neither the folder's name nor the job's output folder is ever shell text.
    """
    job, plan = planned("cpu", "zero2", output_dir=f"runs {HOSTILE}", **tiny_job)
    write_files(tmp_path / HOSTILE, job, plan)
    command: list[str | Path] = ["bash", tmp_path / HOSTILE / "launch.sh"]
    trained = tmp_path / f"runs {HOSTILE}" / "x"
    log = tmp_path / "first.log"
    with log.open("w") as output:
        first = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=output, stderr=output)
        deadline_s = time.monotonic() + 240
        while len(steps_of(trained)) < 10 and first.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) != 0, log.read_text()
    done = len(steps_of(trained))
    assert 10 <= done < 150, log.read_text()
    second = run(command, tmp_path)
    assert f"Resuming from checkpoint-{done}" in second.stderr
    assert "Running: strategy zero2, world_size 2, device cpu, backend gloo" in second.stdout + second.stderr
    records = steps_of(trained)
    assert [record["step"] for record in records] == list(range(1, 151))
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    assert (trained / "final_model" / "model.safetensors").exists()
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.long
def test_launch_sh_trains_across_nodes(tmp_path: Path, tiny_job: dict[str, Any]) -> None:
    """S4-49, S1-14: two torchruns that meet at an address, here of one machine, are one run of two ranks."""
    with_fewer_steps = tiny_job | {"train": tiny_job["train"] | {"num_train_epochs": 2.0}}
    job, plan = planned("cpu", "ddp", output_dir=str(tmp_path / "runs"), **with_fewer_steps)
    write_files(tmp_path / "files", job, plan, Nodes(2, 1))
    assert (tmp_path / "files" / "accelerate_config_multi_node.yaml").exists()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    nodes = [
        subprocess.Popen(
            ["bash", tmp_path / "files" / "launch.sh"],
            cwd=tmp_path,
            env=environment(NODE_RANK=number, MASTER_ADDR="localhost", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in ("0", "1")
    ]
    said = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "world_size 2" in "".join(said)
    assert [record["step"] for record in steps_of(tmp_path / "runs" / "x")] == list(range(1, 11))


def torchrun_call(folder: Path, *arguments: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """Run launch.sh with a python that only says how it was called; return torchrun's options and the environment."""
    stand_in = folder / "bin" / "python"
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"
    done = run(["bash", folder / "launch.sh", *arguments], folder, PATH=path, **variables)
    called, seen = json.loads(done.stdout)
    assert called[:3] == ["-m", "trainwright.train.launcher", "torchrun"]
    return called[3:], seen


def test_launch_sh_gives_torchrun_what_was_planned(tmp_path: Path) -> None:
    """S4-10, S4-47, S1-11: as many processes as GPUs, on the planned ones unless the user names others."""
    write_files(tmp_path, *planned("a100-80gb:4", "ddp"))
    called, seen = torchrun_call(tmp_path)
    assert called == ["--nproc-per-node=4", "-m", "trainwright.train.under_torchrun", str(tmp_path)]
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["CUDA_DEVICE_ORDER"]) == ("0,1,2,3", "PCI_BUS_ID")
    assert torchrun_call(tmp_path, CUDA_VISIBLE_DEVICES="4,5,6,7")[1]["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    called, _ = torchrun_call(tmp_path, "train.py", "--note", HOSTILE)
    assert called[1:] == ["train.py", "--note", HOSTILE]


def test_launch_sh_names_the_host_of_the_meeting(tmp_path: Path) -> None:
    """S4-49, T-07: each node's own number, also Slurm's, decides; without one it says what to set."""
    write_files(tmp_path, *planned("a100-80gb:4x2", "fsdp2"))
    for variables, node in (({"NODE_RANK": "0"}, 0), ({"NODE_RANK": "1"}, 1), ({"SLURM_NODEID": "1"}, 1)):
        called, _ = torchrun_call(tmp_path, MASTER_ADDR="192.168.1.1", **variables)
        assert {"--nnodes=2", "--nproc-per-node=4", f"--node-rank={node}"} <= set(called)
        assert {"--master-addr=192.168.1.1", "--master-port=29500"} <= set(called)
    without = subprocess.run(["bash", tmp_path / "launch.sh"], env=environment(), capture_output=True, text=True)
    assert without.returncode != 0
    assert "set NODE_RANK to the number of this machine, 0 to 1" in without.stderr


def test_the_same_plan_gives_the_same_bytes_and_leaves_nothing_of_another(tmp_path: Path) -> None:
    """T-01: a file of an earlier plan would contradict this one's."""
    first = {path.name: path.read_bytes() for path in write_files(tmp_path, *planned("v100-32gb:4", "zero3"))}
    write_files(tmp_path, *planned("a100-80gb:4x2", "ddp"))
    assert {path.name for path in tmp_path.iterdir()} == {
        "resolved.json",
        "plan.json",
        "accelerate_config_multi_node.yaml",
        "launch.sh",
    }
    again = {path.name: path.read_bytes() for path in write_files(tmp_path, *planned("v100-32gb:4", "zero3"))}
    assert again == first
    assert {path.name for path in tmp_path.iterdir()} == set(first)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """Nor is a name taken that would end a line of a script."""
    (tmp_path / "deepspeed.json").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        write_files(tmp_path, *planned("a100-80gb:2", "ddp"))
    assert [path.name for path in tmp_path.iterdir()] == ["deepspeed.json"]
    with pytest.raises(UserError, match="control characters"):
        write_files(tmp_path / "a\nb", *planned("a100-80gb:2", "ddp"))


def test_the_engine_gets_the_same_stage_precision_and_offload() -> None:
    """X-04: the project's own workers run under numbers, not under `auto`."""
    from trainwright.launch.files.deepspeed import engine_config

    job, plan = planned(
        "v100-32gb:4",
        "zero3",
        train={"global_batch_size": 16, "micro_batch_size": 2, "max_grad_norm": 0.5},
        resources={"offload": "optimizer+parameters"},
    )
    config = engine_config(job, plan.layout)
    assert "auto" not in json.dumps(config)
    assert config["zero_optimization"]["stage"] == 3
    assert {"offload_optimizer", "offload_param"} <= config["zero_optimization"].keys()
    assert (config["fp16"]["enabled"], config["bf16"]["enabled"]) == (True, False)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[key] for key in sizes] == [16, 2, 2]
    assert config["gradient_clipping"] == 0.5

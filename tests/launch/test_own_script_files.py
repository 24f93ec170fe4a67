"""The files and variables by which a launcher and a script learn of a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_files import planned

from trainwright.launch.files import Nodes
from trainwright.launch.files.accelerate import accelerate_environment, accelerate_yaml
from trainwright.launch.files.plan_folder import file_texts

FALSE_UNLESS_TOLD = {"ACCELERATE_USE_CPU": "false"}
"""accelerate leaves out what is false by default."""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
def test_ranks_of_several_nodes_find_what_accelerate_launch_would_tell_them(tmp_path: Path, strategy: str) -> None:
    """torchrun starts them; the variables are those that accelerate makes of the same file."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    _, plan = planned("a100-80gb:2x2", strategy)
    nodes, deepspeed_json = Nodes(2, 2), tmp_path / "deepspeed.json"
    config = tmp_path / "accelerate.yaml"
    config.write_text(accelerate_yaml(plan.layout, nodes, deepspeed_json))
    where = ["--machine_rank", "1", "--main_process_ip", "127.0.0.1"]
    told, defaults, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(config), *where, "train.py"])
    )
    if strategy.startswith("zero"):
        told.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        theirs = prepare_deepspeed_cmd_env(told)[1]
    else:
        theirs = prepare_multi_gpu_env(told)
    ours = accelerate_environment(plan.layout, nodes, deepspeed_json)
    for name, value in ours.items():
        assert theirs.get(name, FALSE_UNLESS_TOLD.get(name)) == value, name


@pytest.mark.parametrize("strategy, names", [("ddp", set()), ("zero2", {"deepspeed.json", "deepspeed_engine.json"})])
def test_a_script_is_named_the_files_that_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, names: set[str]
) -> None:
    """T-01: the file in the command is the one that says what the plan does; without ZeRO the option is left out."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("from transformers import Trainer")
    job, plan = planned(
        "a100-80gb:2", strategy, script=["python", "train.py", "--deepspeed", "{deepspeed_config}", "{strategy}"]
    )
    texts = file_texts(tmp_path / "files", job, plan, Nodes(1, 2))
    command = json.loads(texts["script.json"])["command"]
    if strategy == "ddp":
        assert command[1:] == ["train.py", "ddp"]
    else:
        assert command[1:] == ["train.py", "--deepspeed", str(tmp_path / "files" / "deepspeed.json"), "zero2"]
        assert json.loads(texts["deepspeed.json"])["zero_optimization"]["stage"] == 2
        engine = json.loads(texts["deepspeed_engine.json"])
        assert "auto" not in json.dumps(engine), "DeepSpeed itself does not know it"
    assert names <= texts.keys()
    assert "trainwright.train.launcher accelerate --config_file" in texts["launch.sh"]

"""A script that is traced saves nothing: its weights are no weights, and its folder may hold real ones."""

from __future__ import annotations

import sys
from typing import Any

import torch

_SAVERS = {
    "transformers.trainer": ("Trainer._save_checkpoint", "Trainer.save_model", "Trainer.save_state"),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained", "PreTrainedModel.push_to_hub"),
    "peft.peft_model": ("PeftModel.save_pretrained",),
    "accelerate.accelerator": ("Accelerator.save_state", "Accelerator.save_model", "Accelerator.save"),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "safetensors.torch": ("save_file", "save_model"),
}
"""By module, if the script has imported it; they write, and some remove what they take for older checkpoints."""


def prevent() -> None:
    """Let all that is imported by now save nothing, for this process."""
    torch.save = _save_nothing
    for module_name, names in _SAVERS.items():
        module = sys.modules.get(module_name)
        for name in names if module is not None else ():
            owner_name, _, attribute = name.rpartition(".")
            owner = getattr(module, owner_name) if owner_name else module
            if hasattr(owner, attribute):
                setattr(owner, attribute, _save_nothing)


def _save_nothing(*args: Any, **kwargs: Any) -> None:
    return None

"""A model's parameters, counted without memory on torch's meta device."""

from __future__ import annotations

from typing import Any

from trainwright.errors import UserError
from trainwright.estimate.request import Request
from trainwright.framework_imports import collector_at_rest


def shapes(config: dict[str, Any], auto_class: str) -> dict[str, Any]:
    """Return the shape of each parameter by name, the names of those of linear layers.

    Raises:
        UserError: transformers refuses the config, or does not know the model.
    """
    with collector_at_rest():
        import torch
        import transformers

        from trainwright.estimate.trace.model import build_config, without_initial_values

    asked = Request(config=config, auto_class=auto_class, micro_batch_size=1, sequence_length=1)  # type: ignore[arg-type]
    built = build_config(asked)
    with without_initial_values(), torch.device("meta"):
        try:
            model = getattr(transformers, auto_class).from_config(built, trust_remote_code=False)
        except (ValueError, TypeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"config: transformers cannot build this model: {reason}") from error
    output = model.get_output_embeddings()
    linear = [
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not output
    ]
    parameters = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    return {
        "parameters": parameters,
        "linear": [name for name in linear if name in parameters],
    }

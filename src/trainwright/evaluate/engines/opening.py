"""Which engine answers, and opening it; torch is imported only when one is opened."""

from __future__ import annotations

from importlib.util import find_spec

from trainwright.errors import UserError, not_installed
from trainwright.evaluate.engines.engine import Engine, EngineName, EngineSettings
from trainwright.framework_imports import collector_at_rest
from trainwright.hardware.choice import Choice


def choose_engine(settings: EngineSettings) -> Choice[EngineName]:
    """Return vllm or transformers, and why.

    Raises:
        UserError: vllm is asked for without a GPU, or the one asked for is not installed (exit code 4).
    """
    on_gpus = isinstance(settings.devices, tuple)
    if settings.engine == "vllm" and not on_gpus:
        raise UserError("engine=vllm needs an NVIDIA GPU", hints=["engine=transformers runs everywhere"])
    if settings.engine == "vllm" and not find_spec("vllm"):
        raise not_installed("engine=vllm", "vllm", instead="engine=transformers")
    if not find_spec("transformers") or not find_spec("torch"):
        if settings.engine == "transformers" or not find_spec("vllm"):
            raise not_installed("answering with a model", "transformers", extra="eval", instead="engine=vllm on a GPU")
        return Choice("vllm", "transformers is not installed")
    if settings.engine != "auto":
        return Choice(settings.engine, "as asked")
    if on_gpus and find_spec("vllm"):
        return Choice("vllm", "it is installed, and there is a GPU")
    return Choice("transformers", "vllm is not installed" if on_gpus else "there is no NVIDIA GPU")


def open_engine(settings: EngineSettings) -> Engine:
    """Return the engine that the settings ask for or that fits best, its model loaded.

    Raises:
        UserError: it is not installed, or the model cannot be loaded (exit code 4), or does not fit (exit code 77).
    """
    if choose_engine(settings).value == "vllm":
        from trainwright.evaluate.engines.vllm_engine import VllmEngine

        return VllmEngine(settings)
    with collector_at_rest():
        from trainwright.evaluate.engines.transformers_engine import TransformersEngine

    return TransformersEngine(settings)

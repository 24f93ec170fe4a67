"""Precision follows the device."""

from __future__ import annotations

import pytest

from trainwright.hardware.inventory import Device
from trainwright.hardware.precision import choose_precision


def gpu(capability: tuple[int, int]) -> Device:
    return Device(kind="cuda", name="GPU", compute_capability=capability)


@pytest.mark.parametrize(
    ("capability", "value"),
    [
        ((12, 0), "bf16"),
        ((9, 0), "bf16"),
        ((8, 9), "bf16"),
        ((8, 6), "bf16"),
        ((8, 0), "bf16"),
        ((7, 5), "fp16"),
        ((7, 0), "fp16"),
        ((6, 0), "fp16"),
    ],
)
def test_precision_follows_the_compute_capability(capability: tuple[int, int], value: str) -> None:
    """S4-18 to S4-21."""
    choice = choose_precision(gpu(capability))
    assert choice.value == value
    assert f"{capability[0]}.{capability[1]}" in choice.reason
    assert choice.warning is None


def test_bf16_on_an_old_gpu_becomes_fp16_with_the_guides_warning() -> None:
    """S4-22, X-04."""
    choice = choose_precision(gpu((7, 0)), "bf16")
    assert choice.value == "fp16"
    assert choice.warning == "GPU compute capability (7, 0) does not support BF16, switching to FP16"


@pytest.mark.parametrize("asked", ["fp16", "fp32", "bf16"])
def test_what_the_gpu_can_do_is_done_as_asked(asked: str) -> None:
    """S4-14: fp16 can be forced."""
    choice = choose_precision(gpu((8, 0)), asked)  # type: ignore[arg-type]
    assert (choice.value, choice.warning) == (asked, None)


def test_a_capability_that_cannot_be_read_comes_from_the_catalogue() -> None:
    assert choose_precision(Device(kind="cuda", name="x", catalog_key="rtx-3090")).value == "bf16"
    assert choose_precision(Device(kind="cuda", name="x", catalog_key="v100-32gb")).value == "fp16"
    unknown = choose_precision(Device(kind="cuda", name="x"))
    assert (unknown.value, "not available" in unknown.reason) == ("fp16", True)


def test_a_mac_trains_in_bf16() -> None:
    """S4-03."""
    assert choose_precision(Device(kind="mps", name="Apple M2")).value == "bf16"


def test_the_cpu_trains_in_bf16_only_with_instructions_for_it() -> None:
    with_them = choose_precision(Device(kind="cpu", name="Xeon", bf16_instructions=("amx_bf16",)))
    assert (with_them.value, "amx_bf16" in with_them.reason) == ("bf16", True)
    without = choose_precision(Device(kind="cpu", name="i7"), "bf16")
    assert without.value == "fp32"
    assert without.warning is not None and "switching to FP32" in without.warning


def test_fp16_on_the_cpu_is_replaced() -> None:
    assert choose_precision(Device(kind="cpu", name="i7"), "fp16").value == "fp32"

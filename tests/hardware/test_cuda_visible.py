"""CUDA_VISIBLE_DEVICES means to us what it means to CUDA."""

from __future__ import annotations

import pytest
import torch

from trainwright.hardware.visible import VisibleGpu, visible_devices

UUIDS = ["GPU-aaaa1111-0", "GPU-aaaa2222-0", "GPU-bbbb3333-0", "GPU-cccc4444-0"]
GPUS = [VisibleGpu(uuid) for uuid in UUIDS]
WITH_MIG = [VisibleGpu("GPU-aa", ("MIG-1111", "MIG-2222")), VisibleGpu("GPU-bb"), VisibleGpu("GPU-cc", ("MIG-3333",))]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("  ", []),
        ("-1", []),
        ("0", [0]),
        ("2,1", [2, 1]),
        (" 2 , 1 ", [2, 1]),
        ("0,2,-1,1", [0, 2]),
        ("0,4,1", [0]),
        ("9", []),
        ("1,x,2", [1]),
        ("NoDevFiles", []),
        ("0,0", []),
        ("1gpu,2", [1, 2]),
        ("GPU-bbbb", [2]),
        ("GPU-bbbb3333-0,GPU-aaaa1", [2, 0]),
        ("GPU-aaaa", []),
        ("GPU-bbbb,GPU-dddd,GPU-cccc", [2]),
        ("GPU-bbbb,GPU-bbbb3", []),
        ("0,GPU-bbbb", [0]),
    ],
)
def test_the_gpus_a_process_sees(value: str | None, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """X-15; torch.cuda's own reader of the variable says the same."""
    assert [UUIDS.index(uuid) for uuid in visible_devices(GPUS, value).uuids] == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert _torch_sees() == expected


def _torch_sees() -> list[int]:
    """The rest of torch.cuda._device_count_nvml, with our four GPUs in place of NVML's."""
    asked = torch.cuda._parse_visible_devices()
    if asked and isinstance(asked[0], str):
        return list(torch.cuda._transform_uuid_to_ordinals(asked, UUIDS))
    numbers = [int(number) for number in asked]
    first_invalid = next((place for place, number in enumerate(numbers) if number >= len(UUIDS)), len(numbers))
    return numbers[:first_invalid]


@pytest.mark.parametrize("value", ["0,4,1", "9", "GPU-dddd", "0,0", ""])
def test_what_is_cut_off_is_said(value: str) -> None:
    assert visible_devices(GPUS, value).notes


@pytest.mark.parametrize(
    ("value", "seen", "allowed"),
    [
        (None, ["MIG-1111"], ["MIG-1111", "MIG-2222", "GPU-bb", "MIG-3333"]),
        ("MIG-2222", ["MIG-2222"], ["MIG-2222"]),
        ("MIG-22,MIG-3333", ["MIG-2222"], ["MIG-2222", "MIG-3333"]),
        ("0", ["MIG-1111"], ["MIG-1111"]),
        ("1", ["GPU-bb"], ["GPU-bb"]),
        ("GPU-bb", ["GPU-bb"], ["GPU-bb"]),
        ("1,2", ["MIG-3333"], ["GPU-bb", "MIG-3333"]),
        ("MIG-4444", [], []),
    ],
)
def test_cuda_sees_one_mig_instance_and_nothing_beside_it(
    value: str | None, seen: list[str], allowed: list[str]
) -> None:
    """MIG User Guide, "CUDA Device Enumeration"."""
    visible = visible_devices(WITH_MIG, value)
    assert (list(visible.uuids), list(visible.allowed)) == (seen, allowed)

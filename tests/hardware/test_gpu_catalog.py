"""The catalogue: complete, found by the drivers' names, and no figure that the silicon could not reach."""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files
from typing import Any

import pytest

from trainwright.errors import UserError
from trainwright.hardware import catalog
from trainwright.hardware.catalog import GpuSpec
from trainwright.hardware.reading import GIB, MIB, NOT_AVAILABLE

CUDA = [gpu for gpu in catalog.catalog().gpus.values() if gpu.kind == "cuda"]
EVERY = list(catalog.catalog().gpus.values())


def key_of(gpu: GpuSpec) -> str:
    return gpu.key


@pytest.mark.parametrize(
    ("driver_name", "total_mib", "key"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-80gb-pcie"),
        ("NVIDIA A100-PCIE-40GB", 40960, "a100-40gb-pcie"),
        ("Tesla V100-SXM2-16GB", 16160, "v100-16gb"),
        ("Tesla V100-SXM2-32GB", 32510, "v100-32gb"),
        ("Tesla P100-PCIE-16GB", 16280, "p100-pcie"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
        ("NVIDIA RTX A6000", 49140, "a6000"),
        ("NVIDIA RTX A6000", 46068, "a6000"),
        ("NVIDIA GeForce RTX 3060", 12288, "rtx-3060-12gb"),
        ("NVIDIA GeForce RTX 3080", 10240, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 3080", 12288, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 3080", 20470, "rtx-3080-20gb"),
        ("GeForce RTX 3090", 24268, "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
        ("Tesla T4", 15109, "t4"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA A10", 23028, "a10"),
        ("NVIDIA A30", 24576, "a30"),
        ("NVIDIA A40", 46068, "a40"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA B200", 183359, "b200"),
        ("NVIDIA GH200 480GB", 97871, "gh200"),
        ("NVIDIA GeForce RTX 2080 Ti", 11264, "rtx-2080-ti"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 4080", 16376, "rtx-4080"),
        ("NVIDIA GeForce RTX 5080", 16303, "rtx-5080"),
        ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "rtx-pro-6000"),
        ("Apple M1", 16384, "m1"),
        ("Apple M2 Max", 65536, "m2-max"),
        ("Apple M3 Pro", 36864, "m3-pro"),
        ("Apple M4", 24576, "m4"),
        ("NVIDIA GeForce RTX 3060", 8192, None),
        ("NVIDIA GeForce RTX 4060 Ti", 8188, None),
        ("NVIDIA GeForce GTX 1080", 8192, None),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name_and_memory(driver_name: str, total_mib: int, key: str | None) -> None:
    """U-02: every GPU of the guides, and those that people have."""
    assert catalog.identify(driver_name, total_mib * MIB) == key


def test_without_a_memory_reading_only_an_unshared_name_decides() -> None:
    assert catalog.identify("NVIDIA GeForce RTX 3090", NOT_AVAILABLE) == "rtx-3090"
    assert catalog.identify("NVIDIA GeForce RTX 3080", NOT_AVAILABLE) is None


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("a100-80gb", "a100-80gb"),
        ("A100-SXM4-80GB", "a100-80gb"),
        ("A100 80GB PCIe", "a100-80gb-pcie"),
        ("RTX 3080 20GB", "rtx-3080-20gb"),
        ("3090", "rtx-3090"),
        ("nvidia geforce rtx 4090", "rtx-4090"),
        ("h100_80gb", "h100"),
        ("M2 Max", "m2-max"),
    ],
)
def test_people_may_write_a_gpu_as_they_know_it(text: str, key: str) -> None:
    assert catalog.find(text).key == key


@pytest.mark.parametrize(
    ("text", "offered"), [("a100", "a100-40gb, a100-40gb-pcie, a100-80gb"), ("h1000", "h100"), ("rtx-4099", "rtx-4090")]
)
def test_a_name_that_is_unknown_or_not_enough_is_answered_with_the_nearest(text: str, offered: str) -> None:
    with pytest.raises(UserError) as caught:
        catalog.find(text)
    assert offered in caught.value.render()


@pytest.mark.parametrize("gpu", EVERY, ids=key_of)
def test_every_gpu_is_found_by_its_own_driver_name(gpu: GpuSpec) -> None:
    total = gpu.total_bytes or gpu.memory_options_gib[0] * GIB
    for name in gpu.driver_names:
        assert catalog.identify(name, total) == gpu.key


# Floating point operations per clock and SM of dense matrix work with fp32 accumulation, and of ordinary fp32, from the
# architectures' whitepapers. It is the silicon's side of the figures: a sparse rate or one with fp16 accumulation is
# twice too high and fails. GeForce cards and the L40 and A10G do half.
TENSOR = {(6, 0): 256, (7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 1024, (8, 9): 1024}
TENSOR |= {(9, 0): 4096, (10, 0): 8192, (12, 0): 1024}
ORDINARY = {(6, 0): 128, (7, 0): 128, (7, 5): 128, (8, 0): 128, (8, 6): 256, (8, 9): 256}
ORDINARY |= {(9, 0): 256, (10, 0): 256, (12, 0): 256}
HALVED = ("rtx-2", "rtx-3", "rtx-4", "rtx-5", "l40", "a10g")


def halved(gpu: GpuSpec) -> bool:
    return gpu.key.startswith(HALVED) and gpu.key != "l40s"


@pytest.mark.parametrize("gpu", CUDA, ids=key_of)
def test_rates_are_dense_and_what_the_silicon_reaches(gpu: GpuSpec) -> None:
    """The implied clock lies between 80 % (large GPUs slow down under tensor load) and 105 % of the boost clock."""
    assert gpu.compute_capability is not None and gpu.sm_count is not None and gpu.boost_mhz is not None
    assert gpu.fp16_tflops is not None
    per_clock = TENSOR[gpu.compute_capability] / (2 if halved(gpu) else 1)
    at_boost = gpu.sm_count * gpu.boost_mhz * 1e6 / 1e12
    assert 0.80 < gpu.fp16_tflops.value / (at_boost * per_clock) < 1.05
    assert 0.80 < gpu.fp32_tflops.value / (at_boost * ORDINARY[gpu.compute_capability]) < 1.05


@pytest.mark.parametrize("gpu", CUDA, ids=key_of)
def test_bf16_and_tf32_come_with_compute_capability_8_and_keep_their_ratios(gpu: GpuSpec) -> None:
    """S4-18: bf16 runs at the rate of fp16, tf32 at half of it."""
    assert gpu.compute_capability is not None and gpu.fp16_tflops is not None
    if gpu.compute_capability < (8, 0):
        assert gpu.bf16_tflops is None and gpu.tf32_tflops is None
    else:
        assert gpu.bf16_tflops is not None and gpu.tf32_tflops is not None
        assert gpu.bf16_tflops.value == gpu.fp16_tflops.value
        assert gpu.tf32_tflops.value == pytest.approx(gpu.fp16_tflops.value / 2, rel=0.02)


@pytest.mark.parametrize("gpu", CUDA, ids=key_of)
def test_memory_sizes_agree_with_each_other(gpu: GpuSpec) -> None:
    """What CUDA gives is less than what the driver shows; that is within a tenth of the nominal size."""
    assert gpu.memory_gib is not None and gpu.total_bytes is not None
    assert 0.9 < gpu.total_bytes / GIB / gpu.memory_gib.value < 1.05
    if gpu.cuda_total_gib is not None:
        assert 0.93 < gpu.cuda_total_gib.value * GIB / gpu.total_bytes < 1


# One direction of one link in GB/s by NVLink generation (NVIDIA NVLink pages and the architectures' whitepapers).
LINK_GB_S = {1: 20, 2: 25, 3: 25, 4: 25, 5: 50}


@pytest.mark.parametrize("gpu", [gpu for gpu in CUDA if gpu.nvlink], ids=key_of)
def test_nvlink_is_links_times_both_directions(gpu: GpuSpec) -> None:
    assert gpu.nvlink is not None
    per_direction = gpu.nvlink.gb_s.value / gpu.nvlink.links / 2
    # The third generation's links of GA102 run at 14.0625 GB/s (GA102 whitepaper, "Third-Generation NVLink").
    expected = 14.0625 if gpu.compute_capability == (8, 6) else LINK_GB_S[gpu.nvlink.generation]
    assert per_direction == pytest.approx(expected)


@pytest.mark.parametrize("gpu", EVERY, ids=key_of)
def test_every_figure_names_its_source(gpu: GpuSpec) -> None:
    sources = catalog.catalog().sources
    assert [name for name, figure in catalog.figures(gpu).items() if not sources[figure.source].strip()] == []


def test_a_figure_without_a_known_source_is_refused() -> None:
    gpu = catalog.find("rtx-3090")
    with pytest.raises(ValueError, match="hearsay"):
        catalog.GpuCatalog(
            sources={"ga102-wp": "whitepaper"},
            gpus={
                "rtx-3090": gpu.model_copy(
                    update={"cuda_total_gib": catalog.Figure(value=24.0, source="hearsay"), "memory_gib": None}
                )
            },
        )


@pytest.mark.parametrize("room", ["hardware", "anatomy"])
def test_no_key_of_a_catalogue_stands_twice(room: str) -> None:
    """JSON takes the last one without a word, and the entry before it would be lost."""
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    json.loads((files(f"trainwright.{room}") / "catalog.json").read_text(), object_pairs_hook=once)
    assert twice == []

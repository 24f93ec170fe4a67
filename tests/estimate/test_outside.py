"""What nvidia-smi shows besides torch's allocator, against published measurements."""

from __future__ import annotations

import pytest

from trainwright.estimate.cuda_overhead import communicator_bytes, context_bytes, outside_bytes
from trainwright.estimate.request import Request
from trainwright.hardware.catalog import catalog

MIB = 1 << 20
GPUS = catalog().gpus
CONFIG = {"model_type": "llama"}


def asked(**values: object) -> Request:
    return Request.parse({"config": CONFIG, "micro_batch_size": 1, "sequence_length": 128, **values})


@pytest.mark.parametrize(
    ("key", "measured_mib"),
    [
        ("rtx-6000-ada", 426),
        ("rtx-3090", 256),
        ("v100-16gb", 307),
        ("rtx-4090", 382),
        ("a100-80gb", 414),
        ("h100", 522),
    ],
)
def test_a_context_is_as_large_as_was_measured(key: str, measured_mib: int) -> None:
    """Sources: estimate/cuda_overhead.py."""
    assert context_bytes(GPUS[key]) == pytest.approx(measured_mib * MIB, rel=0.05)


def test_a_communicator_is_as_large_as_was_measured() -> None:
    """Four A100s with NVLink, groups of two and of four: github.com/NVIDIA/nccl/issues/964."""
    assert communicator_bytes(2, GPUS["a100-80gb"]) == 544 * MIB
    assert communicator_bytes(4, GPUS["a100-80gb"]) == 688 * MIB


def test_more_ranks_than_three_take_no_more() -> None:
    """A ring and a tree have the same neighbours however many there are."""
    assert communicator_bytes(4, GPUS["h100"]) == communicator_bytes(1024, GPUS["h100"])


def test_cards_without_nvlink_exchange_through_little_memory() -> None:
    assert communicator_bytes(2, GPUS["rtx-4090"]) < 0.1 * communicator_bytes(2, GPUS["rtx-3090"])


def test_parts_by_strategy() -> None:
    gpu = GPUS["a100-80gb"]
    single = outside_bytes(asked(), gpu)
    ddp = outside_bytes(asked(strategy="ddp", world_size=2), gpu)
    zero = outside_bytes(asked(strategy="zero3", world_size=2), gpu)
    assert "communicators" not in single
    assert sum(ddp.values()) - sum(single.values()) > communicator_bytes(2, gpu), "NCCL's kernels come to its buffers"
    assert zero["communicators"] - ddp["communicators"] == communicator_bytes(2, gpu)
    assert outside_bytes(asked(), None) == single, "an unknown GPU counts as an A100"


def test_other_devices_have_no_cuda_context() -> None:
    assert outside_bytes(asked(device="cpu"), None) == {}
    assert outside_bytes(asked(), GPUS["m2-max"]) == {}

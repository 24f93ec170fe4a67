"""How a model that answers is spread over devices: the guide's table on its own cards, on A100s and on a processor."""

from __future__ import annotations

import dataclasses

import pytest

from trainwright.anatomy import Anatomy, anatomy
from trainwright.anatomy.catalog import config_of
from trainwright.errors import ExitCode, UserError
from trainwright.hardware.inventory import Device, parse_inventory
from trainwright.hardware.reading import GIB
from trainwright.plan.modes import AnswerMode, GpuMode, answer_dtype, answer_mode


def qwen(size: str) -> Anatomy:
    return anatomy(config_of(f"Qwen/Qwen2.5-{size}-Instruct"))


def cards(text: str, **free_gib: float) -> tuple[Device, ...]:
    """Return GPUs; `_2=1.5` says that of number 2 only 1.5 GiB are free."""
    devices = list(parse_inventory(text).usable)
    for name, free in free_gib.items():
        number = int(name[1:])
        devices[number] = dataclasses.replace(devices[number], memory_free_bytes=int(free * GIB))
    return tuple(devices)


def processor(gib: float) -> tuple[Device, ...]:
    return (Device(kind="cpu", name="a processor", memory_total_bytes=int(gib * GIB)),)


def chosen(
    size: str, devices: tuple[Device, ...], asked: GpuMode = "auto", dtype: str = "fp16", **more: int
) -> AnswerMode:
    return answer_mode(qwen(size), devices, asked, dtype=dtype, samples=4, length=1024, **more)


@pytest.mark.parametrize(
    "size, mode, gpus, copies",
    [
        ("1.5B", "data_parallel", 1, 8),
        ("3B", "data_parallel", 1, 8),
        ("7B", "data_parallel", 2, 4),
        ("14B", "data_parallel", 4, 2),
        ("32B", "accelerate", 8, 1),
    ],
)
def test_the_guides_table_on_its_own_eight_cards(size: str, mode: str, gpus: int, copies: int) -> None:
    """S3-18, X-09, done-when 6: the guide's GPUs for one copy (1, 1, 2-4, 3-4, 6-8); 7B is no replica a card."""
    found = chosen(size, cards("rtx-3060-12gb:8"))
    assert (found.mode, found.gpus_per_replica, found.replicas) == (mode, gpus, copies)
    used = [number for group in found.groups for number in group]
    assert used == list(range(8)), "every card once"
    assert "weights" in found.reason and "room for 11.0 GiB" in found.reason
    assert found.gpu_bytes <= 11.0 * GIB
    if gpus > 1:
        assert "as one is too small" in found.reason


@pytest.mark.parametrize("size", ["1.5B", "3B", "7B", "14B", "32B"])
def test_each_model_of_the_table_fits_on_one_a100_with_80_gb(size: str) -> None:
    """Done-when 6: alone on one, a copy on each of several."""
    assert chosen(size, cards("a100-80gb:1")).mode == "single"
    found = chosen(size, cards("a100-80gb:4"))
    assert (found.mode, found.replicas, found.gpus_per_replica) == ("data_parallel", 4, 1)


def test_the_table_on_a_processor() -> None:
    """S3-16: 1.5B and 3B on a processor; what does not fit is refused with the figures."""
    for size in ("1.5B", "3B"):
        assert chosen(size, processor(16), dtype="fp32").mode == "single"
    for size in ("7B", "14B", "32B"):
        with pytest.raises(UserError, match=r"into the host's memory: weights \d+\.\d GiB") as caught:
            chosen(size, processor(16), dtype="fp32")
        assert caught.value.exit_code is ExitCode.NO_PLAN_FITS
        assert "dtype=bf16" in caught.value.render()


def test_copies_on_a_processor_share_its_memory() -> None:
    """Two of 3B do not fit where one does, and that is what is offered."""
    assert chosen("1.5B", processor(16), dtype="fp32", cpu_replicas=2).replicas == 2
    with pytest.raises(UserError, match="2 times") as caught:
        chosen("3B", processor(16), dtype="fp32", cpu_replicas=2)
    assert "one replica, which fits" in caught.value.hints


@pytest.mark.parametrize("asked", ["single", "data_parallel"])
def test_a_copy_that_does_not_fit_on_one_card_is_refused_with_groups_instead(asked: GpuMode) -> None:
    """X-09, X-10: 7B in fp16 on cards of 12 GB; groups of 2, and layers over all, are what to do instead."""
    with pytest.raises(UserError, match=r"weights 14\.2 GiB .* room for 11\.0 GiB") as caught:
        chosen("7B", cards("rtx-3060-12gb:4"), asked)
    assert caught.value.exit_code is ExitCode.NO_PLAN_FITS
    assert "gpu_mode=data_parallel gpus_per_replica=2 makes 2 groups of 2 GPUs" in caught.value.hints
    assert any("gpu_mode=accelerate" in hint for hint in caught.value.hints)


def test_what_is_offered_instead_works() -> None:
    """Issue 6: data_parallel over sharded groups, 2 x 2 GPUs; and one copy over all four."""
    groups = chosen("7B", cards("rtx-3060-12gb:4"), "data_parallel", gpus_per_replica=2)
    assert (groups.mode, groups.groups) == ("data_parallel", ((0, 1), (2, 3)))
    spread = chosen("7B", cards("rtx-3060-12gb:4"), "accelerate")
    assert (spread.mode, spread.groups) == ("accelerate", ((0, 1, 2, 3),))


def test_a_group_too_small_is_refused_with_the_size_that_does() -> None:
    """14B over two cards of 12 GB."""
    with pytest.raises(UserError, match="does not fit on 2 GPUs") as caught:
        chosen("14B", cards("rtx-3060-12gb:8"), "data_parallel", gpus_per_replica=2)
    assert any("gpus_per_replica=4" in hint for hint in caught.value.hints)


def test_too_large_for_all_cards_offers_neither_fewer_gpus_nor_shorter_questions() -> None:
    """X-13: fewer GPUs make it worse; and where the weights alone do not fit, questions are not to blame."""
    for asked in ("auto", "accelerate", "data_parallel"):
        with pytest.raises(UserError, match="does not fit on 8") as caught:
            chosen("72B", cards("rtx-3060-12gb:8"), asked)  # type: ignore[arg-type]
        text = caught.value.render()
        assert "more GPUs" in text and "fewer GPUs" not in text and "shorter" not in text


def test_shorter_questions_are_offered_where_the_weights_do_fit() -> None:
    """64 questions of 32,768 tokens on one card that holds the model."""
    with pytest.raises(UserError) as caught:
        answer_mode(qwen("3B"), cards("rtx-3060-12gb:1"), dtype="fp16", samples=64, length=32768)
    assert "fewer questions at a time, or shorter ones" in caught.value.hints


def test_a_card_in_use_is_left_out_and_named() -> None:
    """S3-15: by what is free on each card, not by a fixed figure."""
    found = chosen("3B", cards("rtx-3060-12gb:4", _1=2.0))
    assert found.groups == ((0,), (2,), (3,))
    assert "not on 1, where it does not fit" in found.reason and "1.8 to 11.0" in found.reason
    assert chosen("3B", cards("rtx-3060-12gb:2", _0=2.0), "single").groups == ((1,),)


def test_layers_go_where_there_is_room_on_unlike_cards() -> None:
    """A copy of 32B (61 GiB) over two A100s, one of them half in use; two small cards beside them are no help."""
    found = chosen("32B", cards("a100-80gb:2", _0=50, _1=40))
    assert found.groups == ((0, 1),) and found.mode == "accelerate"
    with pytest.raises(UserError):
        chosen("32B", cards("a100-80gb:2", _0=40, _1=25))


def test_what_a_processor_computes_in_of_its_own_accord_is_fp32() -> None:
    """Where bf16 is asked for it is taken; a GPU takes what it does best."""
    [device] = processor(16)
    assert answer_dtype(device).value == "fp32"
    assert answer_dtype(device, "bf16").value == "bf16"
    assert answer_dtype(cards("v100-32gb")[0]).value == "fp16"
    assert answer_dtype(cards("rtx-3060-12gb")[0]).value == "bf16"

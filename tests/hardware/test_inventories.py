"""Inventories that are written down."""

from __future__ import annotations

import json

import pytest

from trainwright.errors import UserError
from trainwright.hardware.inventory import NvLink, parse_inventory
from trainwright.hardware.reading import GIB, NOT_AVAILABLE
from trainwright.hardware.selection import select_devices


def test_the_guides_mixed_node() -> None:
    """S0-08."""
    inventory = parse_inventory("a100-80gb:2,v100-32gb:2")
    assert [device.catalog_key for device in inventory.devices] == ["a100-80gb"] * 2 + ["v100-32gb"] * 2
    assert [device.cuda_ordinal for device in inventory.devices] == [0, 1, 2, 3]
    assert [device.compute_capability for device in inventory.devices] == [(8, 0), (8, 0), (7, 0), (7, 0)]
    assert inventory.devices[2].memory_total_bytes == 32 * GIB
    assert inventory.nodes == 1
    assert [device.index for device in select_devices(inventory, "1,2")] == [1, 2]


def test_the_guides_two_3080_and_a_small_host() -> None:
    inventory = parse_inventory("RTX 3080 20GB:2, host=16gib")
    assert inventory.host.memory_total_bytes == 16 * GIB
    assert [device.memory_total_bytes for device in inventory.devices] == [20 * GIB] * 2


def test_links_are_assumed_only_where_they_are_wired_in() -> None:
    on_board, alone, bridged, none = (
        parse_inventory(text).devices[0].nvlink for text in ("h100:2", "h100", "rtx-3090:2", "rtx-4090:2")
    )
    assert on_board == NvLink(links=18, generation=4, peers=(1,))
    assert (alone, bridged, none) == (None, None, None)


def test_several_nodes() -> None:
    inventory = parse_inventory("h100:8x4")
    assert inventory.nodes == 4
    assert [(device.node, device.index) for device in inventory.usable] == [(n, i) for n in range(4) for i in range(8)]
    assert [device.node for device in select_devices(inventory, [0])] == [0, 1, 2, 3]


def test_a_mac_with_its_memory() -> None:
    [device] = parse_inventory("m2-max-64gb").devices
    assert (device.kind, device.memory_total_bytes, device.cuda_ordinal) == ("mps", 64 * GIB, None)
    assert parse_inventory("m2-max").devices[0].memory_total_bytes is NOT_AVAILABLE


def test_what_is_not_known_is_null_in_json() -> None:
    plain = json.loads(json.dumps(parse_inventory("t4:1").to_json()))
    assert plain["devices"][0]["memory_free_bytes"] is None
    assert plain["host"] == dict.fromkeys(plain["host"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a100-80gb:0",
        "a100-80gb:2:2",
        "a100-80gb=2",
        "host=16gib",
        "h100:8x0",
        ",",
        "t4:x2",
        "h100:65",
        "h100:8x1025",
    ],
)
def test_text_that_is_no_inventory_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_inventory(text)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UserError) as caught:
        parse_inventory("a100:2,h1000:3,t4:1,zz=")
    assert len(caught.value.problems) == 3


def test_no_gpu_is_no_run() -> None:
    with pytest.raises(UserError, match="ask for 1 or more"):
        select_devices(parse_inventory("t4:2"), 0)

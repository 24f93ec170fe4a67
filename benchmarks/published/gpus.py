"""GPUs by the names that rows give them, and one device for each rank over nodes of at most eight."""

from __future__ import annotations

import re

from trainwright.errors import UserError
from trainwright.hardware import catalog
from trainwright.hardware.inventory import Device, parse_inventory

NODE = 8
"""GPUs of a node of the servers that rows with more ranks were measured on."""


def key_of(name: str) -> str | None:
    """Return the catalogue's key of a GPU, without a power limit in brackets; None where it is not in it."""
    plain = re.sub(r"\s*\(.*\)", "", name)
    for text in (plain, re.sub(r"[ _-]?\d+\s*GB$", "", plain, flags=re.IGNORECASE)):
        try:
            return catalog.find(text).key
        except UserError:
            continue
    return None


def devices_of(key: str, ranks: int, *, node: int = NODE) -> tuple[Device, ...]:
    """Return the devices of `ranks` ranks, `node` on each node, or all on one where they do not fill nodes."""
    nodes = ranks // node if ranks % node == 0 else 1
    return parse_inventory(f"{key}:{ranks // nodes}x{nodes}").usable

"""`trainwright gpus`: what devices there are, what they can do, and who is using them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.errors import UserError

if TYPE_CHECKING:
    from trainwright.hardware.inventory import Device, Inventory

# The hardware room is imported inside the command: pydantic and NVML would slow `trainwright --help`.


def gpus(
    spec: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="SPEC",
            help="Some of this machine's (0,1, UUIDs, MIG ids), or others written down (a100-80gb:2,v100-32gb:2).",
        ),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Those of the Slurm cluster that this machine submits to.")
    ] = False,
    gpu_type: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE=MODEL", help="With --slurm: what a type of the cluster's is (a100=a100-80gb)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the GPUs with memory, precision, links and users; without one, what trains instead."""
    if slurm:
        _of_cluster(spec, gpu_type or (), as_json)
        return
    if gpu_type:
        raise UserError("`--gpu-type` tells what a type of a cluster's is", hints=["add --slurm"])
    from trainwright.hardware.device_text import device_table, gpu_info_block, host_lines, mixed_gpus_block
    from trainwright.hardware.inventory_source import asked_inventory

    inventory = asked_inventory(spec)
    if as_json:
        typer.echo(json.dumps(_document(inventory), indent=2, ensure_ascii=False))
        return
    for line in (*device_table(inventory), "", *host_lines(inventory)):
        typer.echo(line)
    for note in inventory.notes:
        typer.echo(f"note: {note}")
    cuda = [device for device in inventory.devices if device.kind == "cuda"]
    if cuda:
        for line in ("", *gpu_info_block(cuda), *mixed_gpus_block([device for device in cuda if device.allowed])):
            typer.echo(line)


def _of_cluster(spec: str | None, gpu_type: Sequence[str], as_json: bool) -> None:
    from trainwright.hardware.slurm.cluster_text import cluster_document, cluster_lines
    from trainwright.hardware.slurm.commands import local_cluster
    from trainwright.hardware.slurm.gpu_types import told_types

    if spec is not None:
        raise UserError("`--slurm` and `--gpus` both name GPUs", hints=["leave one of them out"])
    cluster = local_cluster()
    model_by_type = told_types(gpu_type, cluster)
    if as_json:
        typer.echo(json.dumps(cluster_document(cluster, model_by_type), indent=2, sort_keys=True, ensure_ascii=False))
        return
    for line in cluster_lines(cluster, model_by_type):
        typer.echo(line)


def _document(inventory: Inventory) -> dict[str, Any]:
    plain = inventory.to_json()
    for record, device in zip(plain["devices"], inventory.devices, strict=True):
        record["precision"] = _precision(device)
        record["catalog"] = _catalog_figures(device)
    return {"schema_version": 1, **plain}


def _precision(device: Device) -> dict[str, str]:
    from trainwright.hardware.precision import choose_precision

    choice = choose_precision(device)
    return {"value": choice.value, "reason": choice.reason}


def _catalog_figures(device: Device) -> dict[str, Any] | None:
    from trainwright.hardware.catalog import catalog, figures

    if device.catalog_key is None:
        return None
    sources = catalog().sources
    return {
        name: {"value": figure.value, "source": sources[figure.source], "unverified": figure.unverified}
        for name, figure in figures(catalog().gpus[device.catalog_key]).items()
    }

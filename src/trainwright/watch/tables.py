"""The tables of a View as plain text cells; the terminal, the page and a pipe each lay them out in their own way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainwright.hardware.reading import printable
from trainwright.launch.hangs.rank_sections import STEP_SECTIONS
from trainwright.watch import formatting
from trainwright.watch.alerts.active_alerts import Alert
from trainwright.watch.samples import GpuSample, HostSample, Sample
from trainwright.watch.view import RankView, RunStatus, View

GAP = "  "


@dataclass(frozen=True)
class Table:
    """Headings and rows; where room is short, columns go in the order of `first_to_go`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    first_to_go: tuple[str, ...] = ()

    def lines(self, width: int | None = None) -> list[str]:
        """Return the headings and the rows as aligned lines, at most `width` wide if columns can be left out for it."""
        columns = list(range(len(self.columns)))
        sizes = [max(len(row[column]) for row in (self.columns, *self.rows)) for column in columns]
        for name in self.first_to_go:
            if width is None or sum(sizes[column] + len(GAP) for column in columns) - len(GAP) <= width:
                break
            columns.remove(self.columns.index(name))
        return [
            GAP.join(row[column].ljust(sizes[column]) for column in columns).rstrip()
            for row in (self.columns, *self.rows)
        ]


def status_lines(run: RunStatus) -> list[str]:
    """Return what the run is, where it stands and how it goes, in at most four lines of 80 columns."""
    attempt = f", attempt {run.attempt}" if run.attempt and run.attempt > 1 else ""
    layout = f"  ({run.layout})" if run.layout else ""
    lines = [f"{run.name}: {run.state}{attempt}{layout}"]
    if run.detail:
        lines.append(f"  {run.detail}")
    if run.step is not None:
        total = f"/{run.total_steps:,}" if run.total_steps else ""
        share = f" ({100 * run.step / run.total_steps:.0f} %)" if run.total_steps else ""
        left = f"  left {formatting.duration(run.left_s)}" if run.left_s is not None else ""
        lines.append(f"step {run.step:,}{total}{share}  epoch {formatting.number(run.epoch, '.2f')}{left}")
        lines.append(
            f"loss {formatting.number(run.loss, '.4f')}  eval {formatting.number(run.eval_loss, '.4f')}  "
            f"{formatting.number(run.tokens_per_s, ',.0f')} tokens/s  {formatting.number(run.step_s, '.3f')} s/step  "
            f"lr {formatting.number(run.learning_rate, '.3g')}"
        )
        saved = f"checkpoint-{run.checkpoint_step}" if run.checkpoint_step is not None else "no checkpoint yet"
        age = f", {formatting.duration(run.checkpoint_age_s)} ago" if run.checkpoint_age_s is not None else ""
        lines.append(f"saved: {saved}{age}")
    return [printable(line) for line in lines]


def tables(view: View) -> list[Table]:
    """Return all tables that have something in them."""
    several = len(view.nodes) > 1
    gpus = [_gpu_row(node, gpu, several) for node in view.nodes for gpu in node.gpus]
    instances = [row for node in view.nodes for gpu in node.gpus for row in _instance_rows(gpu)]
    made = [
        alerts_table(view.alerts),
        Table("Ranks", _RANK_COLUMNS, tuple(_rank_row(rank, view) for rank in view.ranks), _RANK_FIRST_TO_GO),
        Table("GPUs", _GPU_COLUMNS, tuple(gpus), _GPU_FIRST_TO_GO),
        Table("MIG instances", ("GPU", "instance", "memory"), tuple(instances)),
        Table("Host", _HOST_COLUMNS, tuple(_host_row(node) for node in view.nodes), _HOST_FIRST_TO_GO),
    ]
    return [table for table in made if table.rows]


def alerts_table(alerts: Iterable[Alert]) -> Table:
    """Return what stands, with its advice."""
    rows = tuple(
        (formatting.clock(alert.since_s), alert.severity, printable(alert.what), printable(alert.advice))
        for alert in alerts
    )
    return Table("Alerts", ("since", "", "what", "advice"), rows, ("advice",))


def notes(view: View) -> list[str]:
    """Return what could not be read, and why."""
    printed = [printable(note) for node in view.nodes for note in node.notes]
    return [*printed, f"{view.unreadable:,} samples or alerts cannot be read"] if view.unreadable else printed


_RANK_COLUMNS = (
    "rank",
    "step",
    "in",
    "step time",
    "data",
    "forward",
    "backward",
    "comm",
    "optimizer",
    "memory",
    "reserved",
    "retries",
    "state",
)
_RANK_FIRST_TO_GO = ("retries", "reserved", "state", "optimizer", "step time", "in")


def _rank_row(rank: RankView, view: View) -> tuple[str, ...]:
    sample = rank.sample
    shares = (formatting.number(rank.shares_pct.get(name), ".0f", "%") for name in STEP_SECTIONS)
    on_gpu = sample.allocated_bytes is not None
    silent_s = view.time_s - sample.time_s
    over = view.run is not None and view.run.state in ("finished", "stopped", "failed")
    late = f", silent {formatting.duration(silent_s)}" if silent_s > 10 and not over else ""
    return (
        str(sample.rank),
        formatting.number(sample.step, ",d"),
        printable(sample.section or formatting.NOT_AVAILABLE),
        formatting.number(rank.step_s, ".3f", "s"),
        *shares,
        formatting.gib(sample.allocated_bytes if on_gpu else sample.resident_bytes),
        formatting.gib(sample.reserved_bytes),
        formatting.number(sample.allocator_retries_total, "d"),
        printable(sample.process_state or formatting.NOT_AVAILABLE) + late,
    )


_GPU_COLUMNS = (
    "GPU",
    "name",
    "memory",
    "util",
    "temp",
    "power",
    "clock",
    "slowed by",
    "PCIe in",
    "PCIe out",
    "NVLink in",
    "NVLink out",
    "ECC",
    "Xid",
    "processes",
)
_GPU_FIRST_TO_GO = (
    "NVLink out",
    "NVLink in",
    "PCIe out",
    "PCIe in",
    "Xid",
    "processes",
    "ECC",
    "clock",
    "slowed by",
    "power",
)
_NORMAL = ("gpu_idle", "application_clocks")


def _gpu_row(node: Sample, gpu: GpuSample, several: bool) -> tuple[str, ...]:
    slowed = None if gpu.throttle_reasons is None else [name for name in gpu.throttle_reasons if name not in _NORMAL]
    name = (gpu.name or formatting.NOT_AVAILABLE).removeprefix("NVIDIA ")
    users = None if gpu.processes is None else [f"{p.pid} {formatting.gib(p.memory_bytes)}" for p in gpu.processes]
    return (
        f"{printable(node.node)}:{gpu.index}" if several else str(gpu.index),
        "LOST" if gpu.lost and gpu.name is None else printable(name) + (" LOST" if gpu.lost else ""),
        formatting.used_of(gpu.memory_used_bytes, gpu.memory_total_bytes),
        formatting.number(gpu.utilization_pct, "d", "%"),
        formatting.number(gpu.temperature_c, "d", "°C"),
        formatting.of_limit(gpu.power_w, gpu.power_limit_w, "W"),
        formatting.of_limit(gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, "MHz"),
        _listed(slowed),
        formatting.rate(gpu.pcie_received_bytes_s),
        formatting.rate(gpu.pcie_sent_bytes_s),
        formatting.rate(gpu.nvlink_received_bytes_s),
        formatting.rate(gpu.nvlink_sent_bytes_s),
        _ecc(gpu),
        formatting.number(gpu.xid_total, "d"),
        _listed(users),
    )


def _ecc(gpu: GpuSample) -> str:
    """Return errors of memory, those that were corrected and those that were not."""
    if gpu.ecc_corrected_total is None and gpu.ecc_uncorrected_total is None:
        return formatting.NOT_AVAILABLE
    return f"{formatting.number(gpu.ecc_corrected_total, 'd')}/{formatting.number(gpu.ecc_uncorrected_total, 'd')}"


def _listed(words: Sequence[str] | None) -> str:
    return formatting.NOT_AVAILABLE if words is None else printable(", ".join(words)) or "-"


def _instance_rows(gpu: GpuSample) -> list[tuple[str, ...]]:
    return [
        (
            str(gpu.index),
            printable(instance.name or instance.uuid or formatting.NOT_AVAILABLE),
            formatting.used_of(instance.memory_used_bytes, instance.memory_total_bytes),
        )
        for instance in gpu.instances or ()
    ]


_HOST_COLUMNS = ("node", "available", "of", "swap", "CPU", "/dev/shm free", "disk free", "OOM kills", "disk", "network")
_HOST_FIRST_TO_GO = ("network", "disk", "swap", "OOM kills", "/dev/shm free")


def _host_row(node: Sample) -> tuple[str, ...]:
    host = node.host
    return (
        printable(node.node),
        formatting.gib(host.memory_available_bytes),
        formatting.gib(host.memory_total_bytes),
        formatting.gib(host.swap_used_bytes),
        _cpu(host),
        formatting.gib(host.shm_free_bytes),
        formatting.gib(host.run_disk_free_bytes),
        formatting.number(host.oom_kill_total, "d"),
        f"{formatting.rate(host.disk_read_bytes_s)} in, {formatting.rate(host.disk_written_bytes_s)} out",
        f"{formatting.rate(host.network_received_bytes_s)} in, {formatting.rate(host.network_sent_bytes_s)} out",
    )


def _cpu(host: HostSample) -> str:
    cores = f" of {len(host.cores_pct)} cores" if host.cores_pct else ""
    return formatting.number(host.cpu_pct, ".0f", "%") + cores

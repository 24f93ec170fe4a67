"""The terminal view by textual's own pilot: what it shows of a view, and what its keys do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from textual.widgets import Static

from trainwright.watch.alerts.active_alerts import Alert
from trainwright.watch.samples import GpuSample, HostSample, RankSample, Sample
from trainwright.watch.terminal import WatchApp
from trainwright.watch.view import RankView, RunStatus, View

GIB = 2**30
ALERT = Alert(
    time_s=10,
    state="fired",
    rule="gpu_temperature",
    subject="GPU 1",
    severity="warning",
    what="GPU 1 is at 91 °C",
    advice="look at its fans",
    figures={},
    threshold={},
    since_s=10,
)
VIEW = View(
    time_s=1000,
    run=RunStatus(
        name="nice[bold]run[/]\x1b]0;owned\x07",
        folder="/runs/nice",
        state="running",
        step=120,
        total_steps=300,
        loss=2.5,
        left_s=730,
        tokens_per_s=1234.5,
        step_s=0.5,
        epoch=1.2,
    ),
    nodes=(
        Sample(
            time_s=999,
            node="n",
            host=HostSample(memory_total_bytes=16 * GIB, memory_available_bytes=5 * GIB),
            gpus=(
                GpuSample(index=0, name="NVIDIA A100-SXM4-40GB", memory_total_bytes=40 * GIB, temperature_c=60),
                GpuSample(index=1, name="NVIDIA A100-SXM4-40GB", lost=True),
            ),
        ),
    ),
    ranks=(RankView(sample=RankSample(rank=0, time_s=999, step=120, section="forward")),),
    alerts=(ALERT,),
    curves_by_step={"loss": tuple((step, 5 - step / 50) for step in range(1, 121)), "tokens_per_s": ()},
    curves_by_time={"host_available_gib": ((0.0, 5.0), (10.0, 6.0))},
)


@dataclass
class Canned:
    """A reader of one view; counts how often it is read."""

    view: View
    reads: int = 0

    def read(self) -> View:
        self.reads += 1
        return replace(self.view, time_s=self.view.time_s + self.reads)


def shown(app: WatchApp) -> str:
    return "\n".join(str(widget.render()) for widget in app.query(Static) if widget.display)


async def settle(app: WatchApp, reader: Canned, pilot: object) -> None:
    for _ in range(600):
        await pilot.pause(0.05)  # type: ignore[attr-defined]
        if reader.reads and "step 120" in shown(app):
            await pilot.pause(0.1)  # type: ignore[attr-defined]
            return
    raise AssertionError(shown(app))


def test_it_shows_run_alerts_ranks_gpus_and_host() -> None:
    """Issue 7: a terminal view of run, ranks, GPUs, host, curves, ETA, alerts; X06: nothing of a name is obeyed."""

    async def look() -> None:
        reader = Canned(VIEW)
        app = WatchApp(reader, period_s=3600)
        async with app.run_test(size=(80, 40)) as pilot:
            await settle(app, reader, pilot)
            text = shown(app)
            assert "nice[bold]run[/]?]0;owned?: running" in text and "\x1b" not in text
            assert "step 120/300 (40 %)" in text and "left 0:12:10" in text
            assert "GPU 1 is at 91 °C" in text and "alerts standing: 1" in text
            assert "A100-SXM4-40GB LOST" in text and "60 °C" in text
            assert "forward" in text and "5.0 GiB" in text
            assert any("\u2800" < character <= "\u28ff" for character in text), "the curve of the loss"
            assert "processes" not in text, "80 columns have no room for it"

    asyncio.run(look())


def test_a_wide_terminal_has_every_column_and_the_keys_work() -> None:
    async def look() -> None:
        reader = Canned(VIEW)
        app = WatchApp(reader, period_s=0.2)
        async with app.run_test(size=(220, 50)) as pilot:
            await settle(app, reader, pilot)
            assert "processes" in shown(app) and "NVLink in" in shown(app)
            await pilot.press("c")
            await pilot.pause(0.1)
            assert "host memory available, GiB" in shown(app)
            await pilot.press("p")
            await pilot.pause(0.5)
            reads = reader.reads
            await pilot.pause(1)
            assert reader.reads == reads and "paused" in shown(app)
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(look())

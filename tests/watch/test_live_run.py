"""A live run of two ranks as its samples, the command, the page in a real browser and the terminal show it.

One run serves all of these; it goes on until the last of them stops it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from chromium import Page, chromium_program
from watched_run import PATIENCE_S, TRAINWRIGHT, WatchedRun, watch

needs_chromium = pytest.mark.skipif(
    chromium_program() is None and not os.environ.get("REQUIRE_CHROMIUM"),
    reason="no Chromium here: `apt-get install chromium`; REQUIRE_CHROMIUM=1 makes this a failure",
)

needs_tmux = pytest.mark.skipif(
    shutil.which("tmux") is None and not os.environ.get("REQUIRE_CHROMIUM"),
    reason="no tmux here: `apt-get install tmux`; REQUIRE_CHROMIUM=1 makes this a failure too",
)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the page of a run."""
    with subprocess.Popen(
        [TRAINWRIGHT, "watch", folder, "--web"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(PATIENCE_S) == 0
            said = server.stderr.read()
            assert "ssh -N -L" in said and "Traceback" not in said


def test_samples_have_the_host_and_both_ranks_as_they_go(live: WatchedRun) -> None:
    """Issue 7, samples: step and sections of each rank; what this machine does not have is not available."""
    first = live.samples()[-1]
    later = live.wait_for(
        lambda: next((s for s in live.samples() if s["ranks"] and s["time_s"] > first["time_s"] + 3), None), "samples"
    )
    for before, after in zip(first["ranks"], later["ranks"], strict=True):
        assert after["step"] > before["step"] and after["total_steps"] == 100_000
        spent_s = {name: after["sections_s_total"][name] - before["sections_s_total"][name] for name in ("forward",)}
        steps = after["steps_total"] - before["steps_total"]
        assert spent_s["forward"] >= 0.15 * (steps - 1), "each pass rests that long"
        assert after["process_state"] in ("R", "S") and after["resident_bytes"] > 50 * 2**20
        assert after["allocated_bytes"] is None and after["gpu_uuid"] is None
    host = later["host"]
    assert 0 < host["memory_available_bytes"] < host["memory_total_bytes"]
    assert host["run_disk_free_bytes"] > 0 and len(host["cores_pct"]) == psutil.cpu_count()


def test_sections_add_up_to_the_time_that_passed(live: WatchedRun) -> None:
    first = live.samples()[-1]
    later = live.wait_for(
        lambda: next((s for s in live.samples() if s["ranks"] and s["time_s"] > first["time_s"] + 5), None), "samples"
    )
    for before, after in zip(first["ranks"], later["ranks"], strict=True):
        passed_s = after["time_s"] - before["time_s"]
        counted_s = sum(after["sections_s_total"].values()) - sum(before["sections_s_total"].values())
        assert abs(counted_s - passed_s) < 1.0, "a section that is under way is counted when it ends"


def test_the_document_is_what_the_files_say(live: WatchedRun) -> None:
    done = watch(str(live.folder), "--json", cwd=live.folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    run = document["run"]
    assert (run["name"], run["state"], run["layout"]) == ("live", "running", "2 x cpu, ddp, fp32")
    record = live.steps()[run["step"]]
    assert {name: run[name] for name in ("loss", "step_s", "tokens_per_s", "learning_rate")} == {
        name: record[name] for name in ("loss", "step_s", "tokens_per_s", "learning_rate")
    }
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert document["curves_by_step"]["loss"][0] == [1, live.steps()[1]["loss"]]
    assert document["curves_by_step"]["loss"][-1] == [run["step"], run["loss"]]


def test_the_time_left_is_the_steps_left_at_the_samples_pace(live: WatchedRun) -> None:
    """U-06: ETA."""
    live.wait_for(lambda: len(live.samples()) >= 5, "samples")
    run = json.loads(watch(str(live.folder), "--json", cwd=live.folder).stdout)["run"]
    step_s = run["left_s"] / (run["total_steps"] - run["step"])
    assert 0.15 < step_s < 10


def test_a_run_is_found_by_its_name_and_shown_in_80_columns_or_whole(live: WatchedRun) -> None:
    done = watch("live", "--once", cwd=live.folder.parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("live: running  (2 x cpu, ddp, fp32)\nstep ")
    heading = next(line for line in done.stdout.splitlines() if line.lstrip().startswith("rank "))
    assert "retries" in heading, "a pipe gets every column"
    assert "\x1b" not in done.stdout


def test_a_pipe_gets_everything_once_and_then_lines(live: WatchedRun) -> None:
    with subprocess.Popen([TRAINWRIGHT, "watch", live.folder], stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        lines = []
        for line in watching.stdout:
            lines.append(line)
            if re.match(r"\d\d:\d\d:\d\d  running \d+/100,000  loss \d", line):
                break
        watching.terminate()
        watching.wait(PATIENCE_S)
    assert lines[0].startswith("live: running")


SHOWN = (
    "Object.fromEntries([...document.querySelectorAll('[data-figure]')].map(e => [e.dataset.figure, e.textContent]))"
)
TABLE = "[...document.querySelectorAll('table[data-table=Ranks] tr')].map(r => [...r.cells].map(c => c.textContent))"


@needs_chromium
def test_the_page_in_a_real_browser_shows_the_files_figures(live: WatchedRun, tmp_path: Path) -> None:
    """Done-when 3 of issue 7."""
    with served(live.folder) as address, Page(tmp_path) as page:
        page.open(address)
        first = page.wait_for(SHOWN, lambda shown: shown and shown.get("step") not in (None, "n/a"))
        # Live: another step comes by itself.
        shown = page.wait_for(SHOWN, lambda shown: shown["step"] != first["step"])
        for figures in (first, shown):
            record = live.steps()[int(figures["step"])]
            assert figures["loss"] == f"{record['loss']:.4f}"
            assert figures["step_s"] == f"{record['step_s']:.3f} s"
            assert figures["tokens_per_s"] == f"{record['tokens_per_s']:,.0f}"
        heading, *rows = page.evaluate(TABLE)
        assert heading[:2] == ["rank", "step"] and [row[0] for row in rows] == ["0", "1"]
        written = {int(row[1].replace(",", "")) for row in rows}
        assert written <= live.steps().keys() | {max(live.steps()) + 1}
        points = page.evaluate("document.querySelector('svg polyline').getAttribute('points').split(' ').length")
        assert points >= 10
        page.resize(390, 844, dark=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "a phone need not scroll sideways"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
        assert {urlsplit(url).netloc for url in page.requested} == {urlsplit(address).netloc}
        assert page.problems == []
        # A script that came in by some text would not run: the policy lets in what has the nonce alone.
        page.evaluate("const s = document.createElement('script'); s.text = 'window.ran = 1'; document.body.append(s)")
        assert page.evaluate("window.ran") is None
        assert any("Content Security Policy" in problem for problem in page.problems)


def test_the_page_answers_nobody_without_token_or_by_another_name(live: WatchedRun) -> None:
    """X08: loopback only, a token, foreign Host headers rejected."""
    with served(live.folder) as address:
        parts = urlsplit(address)
        assert parts.hostname == "127.0.0.1" and len(parts.path) > 24 and parts.port is not None
        token = parts.path.strip("/")

        def get(path: str, host: str | None = None) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=PATIENCE_S)
            connection.request("GET", path, headers={} if host is None else {"Host": host})
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, headers, b"" if path.endswith("events") else answer.read()

        for path in ("/", "/events", "/page.js", f"/{token[:-1]}/", f"/{token}x/events", "//", "/%00/", f"/x/{token}/"):
            status, headers, body = get(path)
            assert (status, body if not path.endswith("events") else b"") in ((403, b"forbidden\n"), (403, b"")), path
            assert "default-src 'none'" in headers["content-security-policy"]
        for host in ("evil.example", f"evil.example:{parts.port}", "127.0.0.1.evil.example", ""):
            assert get(f"/{token}/", host)[0] == 403, host
        for host in (f"localhost:{parts.port}", "localhost:8080", "127.0.0.1", f"[::1]:{parts.port}"):
            assert get(f"/{token}/", host)[0] == 200, host
        status, headers, body = get(f"/{token}/")
        assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
        nonce = re.search(r"script-src 'nonce-([\w-]+)'", headers["content-security-policy"])
        assert nonce is not None and nonce[1].encode() in body
        assert nonce[1].encode() not in get(f"/{token}/")[2], "a nonce is used once"
        assert "unsafe" not in headers["content-security-policy"] and "server" not in headers
        listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == parts.port]
        assert [connection.laddr.ip for connection in listening] == ["127.0.0.1"]


@needs_tmux
def test_the_terminal_view_on_a_real_terminal(live: WatchedRun, tmp_path: Path) -> None:
    """Done-when 3 of issue 7: tmux' screens, at 80 columns and wide."""
    tmux = ["tmux", "-S", str(tmp_path / "tmux")]
    for width in (80, 160):
        run: Any = [*tmux, "new-session", "-d", "-x", str(width), "-y", "40", "-s", f"w{width}"]
        # The width is the terminal's own and not what a calling program says of another one.
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        command = [*run, TRAINWRIGHT, "watch", str(live.folder)]
        subprocess.run(command, check=True, timeout=PATIENCE_S, env=environment)
    try:
        for width in (80, 160):
            screen = live.wait_for(lambda width=width: _screen(tmux, width), "a screen with ranks")
            assert re.search(r"live: running .*\n.*step \d+/100,000 \(\d+ %\)", screen)
            assert all(len(line) <= width for line in screen.splitlines())
            assert width == 160 or "retries" not in screen
            assert "n/a" in screen, "reserved memory, on a CPU"
        subprocess.run([*tmux, "send-keys", "-t", "w80", "q"], check=True, timeout=PATIENCE_S)
        listing = [*tmux, "list-sessions", "-F", "#{session_name}"]
        live.wait_for(
            lambda: subprocess.run(listing, capture_output=True, text=True, check=False).stdout == "w160\n", "the end"
        )
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, timeout=PATIENCE_S)


def _screen(tmux: list[str], width: int) -> str | None:
    shown = subprocess.run(
        [*tmux, "capture-pane", "-p", "-t", f"w{width}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    ).stdout
    return shown if ("retries" if width == 160 else "Ranks") in shown else None


OVER = ("rank_silent", "cleared")


def test_a_rank_that_is_stopped_is_told_on_the_console_and_in_the_views(live: WatchedRun) -> None:
    """H02: says "stopped (state T)"; the alert is over once it goes on."""
    process = psutil.Process(live.samples()[-1]["ranks"][1]["pid"])
    process.suspend()
    try:
        live.wait_for(lambda: [a for a in live.alerts() if a["rule"] == "rank_silent"], "an alert")
        document = json.loads(watch(str(live.folder), "--json", cwd=live.folder).stdout)
        standing = {alert["rule"]: alert for alert in document["alerts"]}
        assert standing["rank_silent"]["subject"] == "rank 1" and "state T" in standing["rank_silent"]["what"]
    finally:
        process.resume()
    live.wait_for(lambda: [a for a in live.alerts() if (a["rule"], a["state"]) == OVER], "its end")
    live.wait_for(lambda: "over: rank 1" in live.console.read_text(), "the launcher to say so")
    said = live.console.read_text()
    assert said.count("alert: rank 1 has given no sign of life") == 1 and f"kill -CONT {process.pid}" in said


def test_the_sampler_ends_with_the_run_and_the_ended_run_is_shown(live: WatchedRun) -> None:
    """A finished run is read from its files alone, its last figures in the last sample."""
    sampler = next(p for p in psutil.Process(live.process.pid).children() if "trainwright.watch.sampler" in p.cmdline())
    assert live.stop() == 75
    deadline_s = time.monotonic() + PATIENCE_S
    while sampler.is_running() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not sampler.is_running()
    last = live.samples()[-1]
    assert {rank["section"] for rank in last["ranks"]} == {"end"}
    assert {rank["step"] for rank in last["ranks"]} == {max(live.steps())}
    document = json.loads(watch(str(live.folder), "--json", cwd=live.folder).stdout)
    assert document["run"]["state"] == "stopped" and document["alerts"] == []
    assert document["run"]["checkpoint_step"] == document["run"]["step"] == max(live.steps())
    piped = watch(str(live.folder), cwd=live.folder)
    assert piped.returncode == 0 and piped.stdout.startswith("live: stopped"), "it prints once and ends"

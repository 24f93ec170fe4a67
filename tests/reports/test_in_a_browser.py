"""The page in a real headless Chromium: its figures are the files', and nothing in it runs or is fetched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from chromium import Page, chromium_program
from written_runs import WrittenRun, document, trainwright

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\x1b[2J"
CARDS = (
    "Object.fromEntries([...document.querySelectorAll('[data-figure]')].map(e => [e.dataset.figure, e.textContent]))"
)
LINES = "[...document.querySelectorAll('svg polyline')].map(line => line.points.numberOfItems)"


@pytest.mark.skipif(
    chromium_program() is None and not os.environ.get("REQUIRE_CHROMIUM"),
    reason="no Chromium here: `apt-get install chromium`; REQUIRE_CHROMIUM=1 makes this a failure",
)
def test_the_page_shows_the_files_figures_and_runs_nothing(tmp_path: Path) -> None:
    """Issue 7, report: SVG plots, CSP, escaping; readable on a phone, in the dark, and printed."""
    run = WrittenRun.whole(tmp_path, claims={HOSTILE: HOSTILE}, job={"description": HOSTILE})
    assert trainwright("report", run.folder.path).returncode == 0
    (report,) = document(run.folder.path)["runs"]
    with Page(tmp_path / "profile") as page:
        page.open(run.folder.report_html.as_uri())
        cards = page.wait_for(CARDS, lambda shown: shown and "step" in shown)
        assert cards["step"] == "100 of 100"
        assert cards["last loss"] == f"{report['summary']['loss']:.4f}"
        assert cards["eval loss"] == "2.2500"
        assert cards["step time, median"] == f"{report['measured']['median_step_s']:g} s"
        assert cards["GPU memory, peak"] == "21.00 GiB" and cards["GPU memory in use, peak"] == "52.5 %"
        assert page.evaluate(LINES) and min(page.evaluate(LINES)) > 1
        tip = page.evaluate("document.querySelector('rect.strip title').textContent")
        assert tip.startswith("step 1 to step 3: training ")
        assert page.evaluate("getComputedStyle(document.querySelector('table')).borderCollapse") == "collapse"
        assert page.evaluate("document.title") == "Report: written"
        assert page.evaluate(f"document.body.textContent.includes({json.dumps(HOSTILE[:40])})")
        assert page.evaluate("document.scripts.length + document.images.length") == 0
        assert page.problems == [] and page.requested == [run.folder.report_html.as_uri()]
        page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))")
        assert page.evaluate("window.ran") is None, "the policy lets nothing run even if it got in"
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        for width, dark in ((390, False), (320, True)):
            page.resize(width, 800, dark=dark)
            page.wait_for(f"document.documentElement.scrollWidth <= {width}")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
        page.call("Emulation.setEmulatedMedia", media="print")
        assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"

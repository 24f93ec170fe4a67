"""Scaling from recorded steps: tables, the rule, the bottleneck, what is refused; nothing is run here."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainwright.cli import main
from trainwright.errors import ExitCode, UserError
from trainwright.hardware.inventory import Device, parse_inventory
from trainwright.job.loading import load_job
from trainwright.launch.failures import Failure
from trainwright.plan.layout import Layout
from trainwright.scaling.bottleneck import Bottleneck, MeasuredCount, bottleneck
from trainwright.scaling.cases import Case, Mode, Refused, cases
from trainwright.scaling.claims import CLAIMS
from trainwright.scaling.counts import AvailableDevices, counts_of, require_available, usual_counts
from trainwright.scaling.figures import Growth, ScalingPoint, growth
from trainwright.scaling.plot import plot, require_plottable
from trainwright.scaling.scaling_run import Scaling, ScalingFlags, Tried, curve, recommended
from trainwright.scaling.scaling_text import explain, to_json
from trainwright.scaling.trial import CoreUse, Failed, Trial, why_failed

PROCESSOR = Device(kind="cpu", name="Processor")
FOUR_CORES = AvailableDevices((PROCESSOR,), 4)


def trial(step_s: float, *, spread: float = 0.0, **rest: object) -> Trial:
    """Five steps around `step_s`; their middle half lies `spread` of it to either side."""
    steps = tuple(step_s * (1 + spread * number) for number in (-2, -1, 0, 1, 2))
    return Trial(step_s=steps, tokens_per_s=tuple(800 / step for step in steps), **rest)  # type: ignore[arg-type]


def grown(*paces: tuple[int, float], spread: float = 0.0) -> list[Growth]:
    """Points of weak scaling, 8 samples a rank: counts, and the median seconds of a step."""
    return growth([ScalingPoint(count=n, global_batch_size=8 * n, trial=trial(s, spread=spread)) for n, s in paces])


def write_job(folder: Path, *lines: str) -> str:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    path = folder / "job.yaml"
    text = ["name: a", "model: {name: Qwen/Qwen2.5-0.5B}", f"data: {{path: {folder}/rows.jsonl, max_length: 128}}"]
    path.write_text("\n".join([*text, *lines]) + "\n")
    return str(path)


def planned(
    folder: Path, counts: Sequence[int], lines: Sequence[str], available: AvailableDevices = FOUR_CORES
) -> list[Case | Refused]:
    inventory = dataclasses.replace(parse_inventory("a100-80gb:4"), devices=available.devices)
    return cases(load_job(write_job(folder, *lines)), str(folder), inventory, available, counts, ("weak", "strong"))


def test_weak_scaling_keeps_the_batch_of_a_rank_and_strong_scaling_that_of_all(tmp_path: Path) -> None:
    """Issue 5, S1-02: the smallest count is a point of both and measured once; data-parallel alone is `single`."""
    found = planned(tmp_path, [1, 2, 4], ["train: {global_batch_size: 16}", "resources: {strategy: ddp}"])
    batches = []
    for case in found:
        assert isinstance(case, Case)
        made = case.plan.layout
        sizes = (made.global_batch_size, made.micro_batch_size, made.gradient_accumulation_steps)
        batches.append((case.count, case.modes, made.strategy, *sizes))
    assert batches == [
        (1, ("weak", "strong"), "single", 16, 8, 2),
        (2, ("weak",), "ddp", 32, 8, 2),
        (2, ("strong",), "ddp", 16, 8, 1),
        (4, ("weak",), "ddp", 64, 8, 2),
        (4, ("strong",), "ddp", 16, 4, 1),
    ]


def test_a_count_that_does_not_divide_costs_only_its_row(tmp_path: Path) -> None:
    """Issue 5: each refused count says why, with the numbers."""
    found = planned(tmp_path, [2, 3, 4], ["train: {global_batch_size: 9}", "resources: {strategy: ddp}"])
    assert [case.count for case in found if isinstance(case, Case)] == [2, 3, 4, 4]
    [refused] = [case for case in found if isinstance(case, Refused)]
    assert (refused.count, refused.modes) == (3, ("weak",))
    assert "9 samples over 2 ranks are 13.5 over 3" in refused.why
    found = planned(tmp_path, [1, 2], ["resources: {strategy: single}"])
    assert [(case.count, isinstance(case, Case)) for case in found] == [(1, True), (2, False), (2, False)]
    assert isinstance(found[1], Refused) and "resources.strategy=single runs 1 rank" in found[1].why


def test_gpus_come_with_the_estimate_of_the_same_layout(tmp_path: Path) -> None:
    """Issue 5: beside our prediction; each count has its own first GPUs."""
    gpus = AvailableDevices(parse_inventory("a100-80gb:4").devices, 4)
    found = planned(tmp_path, [1, 4], ["train: {global_batch_size: 32}"], gpus)
    for case in found:
        assert isinstance(case, Case) and case.plan.devices == gpus.devices[: case.count]
        assert case.plan.estimate is not None and case.plan.estimate.time is not None
    assert {case.count for case in found} == {1, 4}


def test_a_trial_reaches_nobody_and_writes_where_it_is_told(tmp_path: Path) -> None:
    """Issue 5: the job's output folder, trackers and alert receivers are left alone."""
    lines = ["output_dir: mine", "tracking: [wandb]", "alerts: {command: [sendmail]}", "checkpoint: {every: 1 steps}"]
    [first, *_] = planned(tmp_path, [1, 2], lines)
    assert isinstance(first, Case)
    assert first.job.output_dir == str(tmp_path) and not first.job.tracking
    assert first.job.alerts.command is None and first.job.checkpoint.every.value >= 1_000_000


@pytest.mark.parametrize("text", ["", "1", "2,2", "1,x", "0,1", "-1,2", "1.5,2"])
def test_counts_are_whole_numbers_and_two_at_least(text: str) -> None:
    with pytest.raises(UserError) as refusal:
        counts_of(text)
    assert refusal.value.exit_code is ExitCode.USAGE and "--gpus 1,2,4,8" in refusal.value.render()


def test_counts_beyond_what_is_here_are_refused_together_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 5: before anything starts."""
    assert counts_of("4 1,2,2") == [1, 2, 4]
    assert [usual_counts(AvailableDevices((PROCESSOR,), most)) for most in (2, 4, 6)] == [
        [1, 2],
        [1, 2, 4],
        [1, 2, 4, 6],
    ]
    with pytest.raises(UserError):
        usual_counts(AvailableDevices((PROCESSOR,), 1))
    with pytest.raises(UserError) as refusal:
        require_available([1, 2, 8, 16], FOUR_CORES)
    assert refusal.value.problems == ("8 ranks asked for, 4 can be used", "16 ranks asked for, 4 can be used")
    assert refusal.value.hints == ("there are: Processor, 4 cores for as many ranks", "--gpus 1,2")
    with pytest.raises(UserError) as refusal:
        require_available([2, 4], AvailableDevices(parse_inventory("v100-32gb:2").devices, 2))
    assert refusal.value.problems == ("4 GPUs asked for, 2 can be used",)

    job = write_job(tmp_path, f"output_dir: {tmp_path}/out")
    arguments = ["scaling", job, "resources.device=cpu", "--gpus", "1,50000,60000"]
    monkeypatch.setattr("sys.argv", ["trainwright", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == ExitCode.MISSING
    assert "50000 ranks asked for" in said and "60000 ranks asked for" in said
    assert not (tmp_path / "out").exists()


def test_throughput_is_of_the_median_step_and_overhead_what_is_missing_of_the_ideal() -> None:
    """S1-28, S1-29: overhead = 1 - actual / ideal."""
    one, two, four = grown((1, 0.1), (2, 0.125), (4, 0.2), spread=0.1)
    assert one.point.samples_s.median == pytest.approx(80) and one.speed_up == 1.0 and one.overhead_pct == 0
    assert (one.point.samples_s.low, one.point.samples_s.high) == pytest.approx((8 / 0.11, 8 / 0.09))
    assert one.point.tokens_s.median == pytest.approx(8000)
    assert two.speed_up == pytest.approx(1.6) and two.efficiency_pct == pytest.approx(80)
    assert four.speed_up == pytest.approx(2.0) and four.overhead_pct == pytest.approx(50)
    assert two.worth.low < 1.6 < two.worth.high


def test_a_curve_that_starts_at_more_than_one_is_told_against_its_start() -> None:
    two, four = grown((2, 0.1), (4, 0.1))
    assert (two.speed_up, two.efficiency_pct) == (1.0, 100.0)
    assert (four.speed_up, four.efficiency_pct) == pytest.approx((2.0, 100.0))


def test_the_count_is_recommended_after_which_one_more_stops_paying() -> None:
    """Issue 5: by a stated rule, with the figures; nothing is said of what was not measured."""
    paces = grown((1, 0.1), (2, 0.11), (4, 0.13), (8, 0.25))  # worth 1, 1.82, 3.08, 3.2 ranks
    chosen = recommended(paces, 50, FOUR_CORES)
    assert chosen.value == 4
    assert "4 to 8: each added one brings 3 % of one's work, less than the 50 % that are asked for" in chosen.reason
    assert recommended(paces, 65, FOUR_CORES).value == 2
    everything = recommended(paces, 1, FOUR_CORES)
    assert everything.value == 8 and "more than 8 ranks were not measured" in everything.reason
    assert "only 1 rank could be measured" in recommended(paces[:1], 50, FOUR_CORES).reason


def test_a_recommendation_within_the_spread_of_the_steps_says_so() -> None:
    steady, shaky = (grown((1, 0.1), (2, 0.14), spread=spread) for spread in (0.001, 0.1))
    assert "could be otherwise" not in recommended(steady, 50, FOUR_CORES).reason
    assert "could be otherwise" in recommended(shaky, 50, FOUR_CORES).reason
    assert "could be otherwise" in recommended(shaky, 40, FOUR_CORES).reason


def sections(*, data: float = 1, passes: float = 80, waits: Sequence[float] = (0,), optimizer: float = 5) -> Trial:
    """A trial of as many ranks as `waits` has, in milliseconds a step; `waits` is each rank's communication."""
    ranks = tuple(
        {"data": data, "forward": passes / 4, "backward": 3 * passes / 4, "communication": wait, "optimizer": optimizer}
        for wait in waits
    )
    in_s = tuple({name: ms / 1000 for name, ms in rank.items()} for rank in ranks)
    return Trial(step_s=(0.1,), tokens_per_s=(1.0,), sections_s=in_s)


def layout(ranks: int, *, device: str = "cuda", strategy: str = "ddp", micro: int = 8) -> Layout:
    return Layout(
        device=device,
        visible_devices=None,
        ranks=ranks,
        strategy="single" if ranks == 1 else strategy,
        precision="fp32",
        offload="none",
        global_batch_size=micro * ranks,
        micro_batch_size=micro,
        gradient_accumulation_steps=1,
        eval_batch_size=8,
        gradient_checkpointing=False,
    )


def held_back(found: Trial, mode: Mode = "weak", cores: CoreUse | None = None, **of_layout: object) -> Bottleneck:
    found = dataclasses.replace(found, cores=cores)
    device = str(of_layout.get("device", "cuda"))
    two = layout(2, **of_layout)  # type: ignore[arg-type]
    return bottleneck(MeasuredCount(two, found), MeasuredCount(layout(1, device=device), sections()), mode)


def test_the_bottleneck_is_the_part_that_grew_by_most_of_the_time_lost() -> None:
    """Issue 5, S2-33: data loading, communication between GPUs, or the host, by the figures that say so."""
    held = held_back(sections(waits=(40, 40)))
    assert held.kind == "communication" and "communication +40.0 ms" in held.figures
    assert held_back(sections(data=40, waits=(1, 1))).kind == "data loading"
    assert held_back(sections(waits=(1, 90))).kind == "slowest rank"
    assert held_back(sections(passes=40, optimizer=15, waits=(1, 1)), "strong").kind == "compute"
    full = CoreUse(allowed=2, used=1.9, machine=2, busy=2.0)
    held = held_back(sections(passes=160, waits=(1, 1)), cores=full, device="cpu")
    assert held.kind == "host cores" and "1.9 of the 2 cores" in held.figures


def test_a_step_that_loses_little_is_held_back_by_what_it_mostly_does() -> None:
    one = MeasuredCount(layout(1), sections())
    assert bottleneck(one, one, "weak").kind == "compute"
    assert held_back(sections(waits=(3, 3))).kind == "compute"
    starved = MeasuredCount(layout(1), sections(data=300))
    assert bottleneck(starved, starved, "strong").kind == "data loading"


def test_what_the_figures_leave_open_is_not_decided() -> None:
    """Issue 5: and says with which figures."""
    assert held_back(sections(data=21, waits=(20, 20), optimizer=26)).kind == "not decided"
    slower = sections(passes=160, waits=(1, 1))
    free = CoreUse(allowed=8, used=2.0, machine=8, busy=2.1)
    for of_layout, words in (
        ({"strategy": "fsdp2"}, "gathers parameters within the passes"),
        ({}, "exchanged while the backward pass runs"),
        ({"device": "cpu"}, "memory that ranks share"),
    ):
        held = held_back(slower, cores=free, **of_layout)
        assert held.kind == "not decided" and words in held.figures
    silent = held_back(Trial(step_s=(0.1,), tokens_per_s=(1.0,)))
    assert silent.kind == "not decided" and "no sections" in silent.figures


def test_claims_are_those_of_the_guide() -> None:
    """S1-28: the preset's words hold the same figures; S1-29: overhead follows from speed-up, cut off."""
    claims = load_job("preset:multi-gpu-base").job.claims
    for count, claim in itertools.islice(CLAIMS.items(), 1, None):
        figures = [float(number) for number in re.findall(r"[\d.]+", claims[f"speed on {count} GPUs"])]
        assert figures == [*claim.speed_up, *claim.overhead_pct]
        slow, fast = (100 * (1 - speed / count) for speed in claim.speed_up)
        assert (int(fast + 1e-9), int(slow + 1e-9)) == claim.overhead_pct


def test_a_count_that_failed_says_why_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 5: out of memory by the words of the rank that ran out, not of the one that waited for it."""
    waiting = Failure(0, 1, None, 1.0, "Traceback ...\nRuntimeError: Connection closed by peer")
    torch_says = "CUDA out of memory. Tried to allocate 2.00 GiB."
    full = Failure(1, 77, None, 2.0, f"error: out of memory in training: {torch_says}\n  figures", "training")
    assert why_failed([waiting, full]) == Failed(f"out of memory in training: {torch_says}")
    assert torch_says in capsys.readouterr().err
    nccl = Failure(0, 1, None, 1.0, "[rank0]: Cuda failure 2 'out of memory'", "training")
    assert why_failed([nccl]) == Failed("out of memory in training: [rank0]: Cuda failure 2 'out of memory'")
    refused = Failure(0, 2, None, 1.0, "error: 12 samples do not fill a batch of 16\n\nhint: lower it")
    assert why_failed([refused]) == Failed("12 samples do not fill a batch of 16")
    broken = Failure(0, 1, None, 1.0, "Traceback (most recent call last):\n  File ...\nValueError: no")
    assert why_failed([broken]) == Failed("ValueError: no")
    assert why_failed([Failure(1, -9, "SIGKILL", 1.0, "")]) == Failed("rank 1 was ended by SIGKILL")


def as_measured(available: AvailableDevices = FOUR_CORES) -> Scaling:
    """One, two and four ranks of weak scaling: four ran out of memory, and one was on a busy machine."""

    def case(count: int) -> Case:
        plan = SimpleNamespace(layout=layout(count, device="cpu"), estimate=None, no_estimate="it is a processor")
        return Case(count=count, modes=("weak",), job=None, plan=plan)  # type: ignore[arg-type]

    busy = CoreUse(allowed=4, used=1.0, machine=4, busy=3.9)
    tried = [
        Tried(case(1), dataclasses.replace(trial(0.1), cores=busy)),
        Tried(case(2), trial(0.125)),
        Tried(case(4), Failed("out of memory in training: CUDA out of memory")),
    ]
    asked = ScalingFlags(counts="1,2,4", modes=("weak",))
    return Scaling(
        job="a", available=available, asked=asked, tried=tuple(tried), curves=(curve("weak", tried, 50, available),)
    )


def test_the_table_marks_what_is_measured_estimated_and_claimed() -> None:
    """Issue 5, U-11: a count that failed has its reason in place of figures."""
    lines = explain(as_measured())
    measured, claimed, *_ = (line for line in lines if line.startswith("  2 "))
    for row, cells in ((measured, ("ddp 8 x 1", "128", "1.60x", "80 %")), (claimed, ("20 %", "1.8-1.9x", "5-10 %"))):
        assert all(cell in row for cell in cells), row
    text = "\n".join(lines)
    assert "speed-up (estimate)" not in text and "speed-up (claim)" in text and "Measured: " in text
    tables = [line for line in lines if line.startswith("  ") and ": " not in line]
    assert max(map(len, tables)) <= 80, "they are whole in a terminal of 80 columns"
    assert "4 ranks: not measured: out of memory in training: CUDA out of memory" in text
    assert "Not estimated: it is a processor" in text
    assert "recommended: 2 ranks" in text
    [warning] = [line for line in lines if line.startswith("warning")]
    assert "1 rank (weak)" in warning and "2.9 of 4 cores" in warning


def test_an_estimate_stands_beside_what_was_measured_of_the_same_layout(tmp_path: Path) -> None:
    """Issue 5: our prediction, marked."""
    gpus = AvailableDevices(parse_inventory("a100-80gb:2").devices, 2)
    tried = [Tried(case, trial(0.1)) for case in planned(tmp_path, [1, 2], ["train: {global_batch_size: 32}"], gpus)]
    found = dataclasses.replace(as_measured(gpus), tried=tuple(tried), curves=(curve("weak", tried, 50, gpus),))
    one, two = to_json(found)["curves"]["weak"]["points"]
    first, second = tried[0].case, tried[1].case
    assert isinstance(first, Case) and first.plan.estimate is not None and first.plan.estimate.time is not None
    assert isinstance(second, Case) and second.plan.estimate is not None and second.plan.estimate.time is not None
    first_s, second_s = first.plan.estimate.time.step_s, second.plan.estimate.time.step_s
    assert (one["estimate"]["step_s"], two["estimate"]["step_s"]) == (first_s, second_s)
    assert two["estimate"]["speed_up"] == pytest.approx(2 * first_s / second_s)
    lines = explain(found)
    beside = lines[next(number for number, line in enumerate(lines) if "speed-up (estimate)" in line) + 2 :][0]
    assert beside.startswith("  2 ") and f"{second_s:.4g}" in beside and f"{2 * first_s / second_s:.2f}x" in beside
    assert any("for samples of data.max_length tokens" in line for line in lines)


def test_json_has_the_same_figures_under_their_kind() -> None:
    document = json.loads(json.dumps(to_json(as_measured())))
    assert document["schema_version"] == 1
    one, two = document["curves"]["weak"]["points"]
    assert two["measured"]["speed_up"] == pytest.approx(1.6) and two["estimate"]["speed_up"] is None
    assert two["claim"] == {"speed_up": [1.8, 1.9], "overhead_pct": [5, 10]} and one["against"] == 1
    assert document["curves"]["weak"]["not_measured"] == {"4": "out of memory in training: CUDA out of memory"}
    assert [run["measured"] is None for run in document["runs"]] == [False, False, True]


def test_the_plot_is_one_file_whose_text_is_escaped(tmp_path: Path) -> None:
    """Issue 5: self-contained; what a device is called stays text."""
    name = 'Chip <script>alert("1")</script> & Co. $x$'
    path = tmp_path / "scaling.svg"
    plot(as_measured(AvailableDevices((dataclasses.replace(PROCESSOR, name=name),), 4)), path)
    root = ElementTree.parse(path).getroot()
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert root.tag.endswith("svg") and not tags & {"script", "image", "foreignObject"}
    links = [value for element in root.iter() for key, value in element.attrib.items() if key.endswith("href")]
    assert all(link.startswith("#") for link in links)
    text = " ".join("".join(element.itertext()) for element in root.iter() if element.tag.endswith("text"))
    assert "<script>" in text and "ideal" in text and "weak (measured)" in text and "guide (claim)" in text


def test_a_plot_that_cannot_be_made_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for path in (tmp_path / "scaling.png", tmp_path / "nowhere" / "scaling.svg"):
        with pytest.raises(UserError):
            require_plottable(path)
    require_plottable(tmp_path / "scaling.svg")

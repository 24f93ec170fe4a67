"""The plan: the layout for a Job on the devices there are, each choice with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.estimate.measured_runs import gpu_model
from trainwright.estimate.traced import torch_kept_open
from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device
from trainwright.hardware.reading import GIB
from trainwright.job.placeholders import names_in
from trainwright.job.schedule import learning_rate_advice, scaled_learning_rate
from trainwright.job.schema import Job
from trainwright.plan.confirmed import confirmed, trace_lines
from trainwright.plan.estimates import Estimate, why_host_may_lack
from trainwright.plan.job_model import NoEstimate, model_of, sized, what_stays_unpacked
from trainwright.plan.layout import Layout
from trainwright.plan.least import Least, by_rule
from trainwright.plan.options import device_sets
from trainwright.plan.own_script import narrowed, own_script, require_values, trace_pointer, warnings_of
from trainwright.plan.reasons import at_once, describe, reasons
from trainwright.plan.remedies import remedies
from trainwright.plan.requirements import (
    device_reason,
    ranks_of,
    require_base_for_adapters,
    require_optimizer_fits,
)
from trainwright.plan.search import Candidate, Goal, SearchRequest, search, weakest_precision
from trainwright.plan.traced_rule import TracedRule, traced_by_rule
from trainwright.plan.tuned import answer_for, setting_of
from trainwright.plan.wish import Wish

RATE = "train.learning_rate"
"""The key of the learning rate, among the choices where the job leaves it open."""
RATE_OF_ADAPTERS, RATE_OF_ALL_WEIGHTS, RATE_FROM_SCRATCH = 2e-4, 2e-5, 3e-4
WORTH_IDLE_GPUS = 0.1
"""A run leaves GPUs idle that it was given only where it is faster by as much: the estimate may be wrong by less."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The layout chosen, the reason of each choice, and advice; `learning_rate` is the peak after any scaling.

    `estimate` is None where there is none, `no_estimate` then says why, and `least` what the layout must hold at least,
    None where that is not known either: then nobody knows whether the layout fits. `ranked` holds the
    best candidate of every way to run the job, best first and the infeasible last. `traces` says which steps were
    traced, and what came of it.
    """

    layout: Layout
    learning_rate: float
    choices: dict[str, Choice[Any]]
    warnings: tuple[str, ...]
    advice: tuple[str, ...]
    devices: tuple[Device, ...]
    estimate: Estimate | None = None
    no_estimate: str | None = None
    least: Least | None = None
    ranked: tuple[Candidate, ...] = ()
    traces: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether it is known, of some of its memory at least, that it fits."""
        return self.estimate is not None or self.least is not None

    @property
    def not_known(self) -> str | None:
        """What is not known of the layout, as a sentence; None where memory is estimated."""
        if self.estimate is not None:
            return None
        if self.least is None:
            return f"Not estimated: {self.no_estimate}. It is not known whether this layout fits"
        fits = "fit" if self.least.why_not is None else "do not fit"
        return (
            f"Not estimated: {self.no_estimate}. Weights, gradients and optimizer states {fits}: {self.least}; whether "
            "activations fit beside them is not known"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data, the same bytes for the same job and devices."""
        return {
            "schema_version": 2,
            "layout": dataclasses.asdict(self.layout),
            "learning_rate": self.learning_rate,
            "choices": {key: {"value": c.value, "reason": c.reason} for key, c in sorted(self.choices.items())},
            "warnings": list(self.warnings),
            "advice": list(self.advice),
            "devices": [_device(device) for device in self.devices],
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "no_estimate": self.no_estimate,
            "least": None if self.least is None else self.least.to_json(),
            "traces": list(self.traces),
            "alternatives": [_as_data(candidate) for candidate in self.ranked],
        }


ORDINARY_WISH = Wish()


def choose(
    job: Job, given: Collection[str], devices: tuple[Device, ...], wish: Wish = ORDINARY_WISH
) -> tuple[Job, Plan]:
    """Return the job with its global batch and learning rate settled, and the plan for `devices`.

    `given` are the keys that the user wrote, dotted.

    Raises:
        UserError: the job cannot run on these devices, all contradictions at once; or, where it must fit, exit code 3
            with the nearest changes that would.
    """
    with torch_kept_open():
        return _choose_tuned(job, given, devices, wish)


def _choose_tuned(job: Job, given: Collection[str], devices: tuple[Device, ...], wish: Wish) -> tuple[Job, Plan]:
    settled, plan = _untuned(job, given, devices, wish)
    tuned = answer_for(setting_of(settled, plan.layout, plan.devices), wish.tuned)
    batch = (job.train.micro_batch_size, job.train.gradient_accumulation_steps)
    # `tune` measures equal parts: GPUs of different speed are better off with the unequal ones that are planned.
    if tuned is None or plan.layout == wish.keep or batch != ("auto", "auto") or plan.layout.rank_samples:
        return settled, plan
    layout = tuned.layout(plan.layout, job)
    if layout != plan.layout:
        fixed = _with_layout(settled, layout)
        measured = dataclasses.replace(wish, may_leave_idle=False, must_fit=False, keep=layout)
        _, again = _untuned(fixed, given, plan.devices, measured)
        stale = {"resources.balance"}
        if layout.sync_each_micro_batch != plan.layout.sync_each_micro_batch:
            stale.add("train.sync_each_micro_batch")
        choices = {key: choice for key, choice in plan.choices.items() if key not in stale}
        plan = dataclasses.replace(again, layout=layout, choices=choices)
    return settled, dataclasses.replace(plan, choices=plan.choices | tuned.choices(layout, job))


def _with_layout(job: Job, layout: Layout) -> Job:
    """Return the job with all that a layout decides written into it."""
    batch = {
        "micro_batch_size": layout.micro_batch_size,
        "gradient_checkpointing": layout.gradient_checkpointing,
        "sync_each_micro_batch": layout.sync_each_micro_batch,
    }
    sharing = {"strategy": layout.strategy, "offload": layout.offload, "balance": "off"}
    return job.model_copy(
        update={
            "train": job.train.model_copy(update=batch),
            "eval": job.eval.model_copy(update={"batch_size": layout.eval_batch_size}),
            "resources": job.resources.model_copy(update=sharing),
        }
    )


def _untuned(job: Job, given: Collection[str], devices: tuple[Device, ...], wish: Wish) -> tuple[Job, Plan]:
    if job.script is None:
        return _choose(job, given, devices, wish)
    script = own_script(job)
    require_values(job)
    found = narrowed(job, script, devices, may_leave_idle=wish.may_leave_idle)
    settled, plan = _choose(found.job, given, found.devices, wish)
    no_estimate = plan.no_estimate
    if not job.model.is_named:
        no_estimate = f"{no_estimate}; {trace_pointer(script, plan.devices, plan.layout.ranks)}"
    warnings = warnings_of(job, script, plan.layout, estimated=plan.estimate is not None)
    plan = dataclasses.replace(
        plan,
        choices=plan.choices | found.choices,
        warnings=(*plan.warnings, *found.warnings, *warnings),
        no_estimate=no_estimate,
    )
    return settled.model_copy(update={"resources": job.resources}), plan


def _choose(job: Job, given: Collection[str], devices: tuple[Device, ...], wish: Wish) -> tuple[Job, Plan]:
    require_base_for_adapters(job)
    kind = devices[0].kind
    written = frozenset(given)
    require_optimizer_fits(job, job.resources.strategy, kind)
    model = model_of(job)
    sets = _sets(job, devices, wish)
    if kind != "cuda" or isinstance(model, NoEstimate):
        return _without_search(
            job, written, sets[-1], wish, sized(job, model, None if wish.tracing is None else wish.tracing.given)
        )
    question = SearchRequest(
        job=job,
        given=written,
        model=model,
        host=wish.host,
        amount=wish.amount,
        calibration=wish.calibration,
        expanding_by=wish.expanding_by,
    )
    ranked = search(question, sets, wish.goal)
    if not ranked:
        raise UserError(
            f"train.global_batch_size={job.train.global_batch_size} is less than one sample for each of the "
            f"{len(devices)} GPUs",
            hints=[f"choose {job.train.global_batch_size} GPUs or fewer", "or raise train.global_batch_size"],
        )
    ranked = confirmed(
        question, ranked, lambda candidates: _preferred(candidates, devices, wish), wish.goal, wish.tracing, wish.keep
    )
    best = _preferred(ranked, devices, wish)
    if best.why_not is not None and wish.must_fit:
        raise _nothing_fits(question, sets, wish.goal, ranked)
    precision = weakest_precision(job, best.devices)
    warnings = [precision.warning] if precision.warning else []
    if (unpacked := what_stays_unpacked(job, model)) is not None:
        warnings.append(unpacked)
    if best.why_not is not None:
        warnings.append(f"by estimate this does not fit: {best.why_not}; `trainwright plan` shows what would")
    if (lacking_host := why_host_may_lack(best.estimate.host, wish.host, devices)) is not None:
        warnings.append(lacking_host)
    choices = reasons(question, best, ranked) | {"resources.device": Choice(kind, device_reason(job, kind))}
    settled, plan = _finished(
        job, best.layout, choices, warnings, best.devices, estimate=best.estimate, ranked=_best_of_each_way(ranked)
    )
    return settled, dataclasses.replace(plan, traces=trace_lines(ranked))


def _without_search(
    job: Job, written: frozenset[str], devices: tuple[Device, ...], wish: Wish, model: NoEstimate
) -> tuple[Job, Plan]:
    """Return a layout by rule, held to what it must hold at least, and to a traced step where one is asked for."""
    kind, tracing = devices[0].kind, wish.tracing
    ways = by_rule(job, written, devices, wish.host, model, must_fit=wish.must_fit, keep=wish.keep, lacks=wish.lacks)
    found = TracedRule(ways[0], None, ())
    if tracing is not None and kind == "cuda" and ways[0].least is not None and ways[0].layout != wish.keep:
        found = traced_by_rule(job, model, ways, devices, tracing, must_fit=wish.must_fit)
    chosen = found.chosen
    precision = weakest_precision(job, devices)
    choices = chosen.choices | {
        "resources.precision": Choice(precision.value, precision.reason),
        "resources.device": Choice(kind, device_reason(job, kind)),
    }
    warnings = [precision.warning] if precision.warning else []
    settled, plan = _finished(
        job, chosen.layout, choices, warnings, devices, estimate=found.estimate, no_estimate=chosen.why_no_estimate
    )
    return settled, dataclasses.replace(plan, least=chosen.least, traces=found.traces)


def _sets(job: Job, devices: tuple[Device, ...], wish: Wish) -> list[tuple[Device, ...]]:
    if not wish.may_leave_idle:
        ranks_of(job, devices)
        return [devices]
    asked = job.resources.ranks if job.resources.ranks != "auto" else job.resources.gpus
    count = asked if isinstance(asked, int) and devices[0].kind != "cpu" else None
    if count is not None and count > len(devices):
        raise UserError(
            f"{count} GPUs asked for, {len(devices)} are there",
            hints=["resources.gpus=auto"],
            exit_code=ExitCode.MISSING,
        )
    sets = device_sets(devices, count)
    strategy = job.resources.strategy
    shared = [chosen for chosen in sets if (len(chosen) == 1) == (strategy == "single")]
    return shared if strategy in ("single", "ddp", "fsdp2") and shared else sets


def _preferred(ranked: Sequence[Candidate], devices: tuple[Device, ...], wish: Wish) -> Candidate:
    """Return the best candidate; one that leaves GPUs idle only where that is worth it, or asked for by the goal."""
    fitting = [candidate for candidate in ranked if candidate.why_not is None]
    kept = [candidate for candidate in fitting if candidate.layout == wish.keep]
    if kept:
        return kept[0]
    ranked = [candidate for candidate in fitting if candidate.layout.strategy not in wish.lacks] or ranked
    best = ranked[0]
    if wish.idle_by_goal:
        return best
    on_all = next((c for c in ranked if len(c.devices) == len(devices) and c.why_not is None), None)
    return best if on_all is None or _is_worth_idle_gpus(best, on_all) else on_all


def _is_worth_idle_gpus(best: Candidate, on_all: Candidate) -> bool:
    """Whether a run is so much faster that what it leaves idle may be; also where nobody knows how fast it is."""
    if best.estimate.time is None or on_all.estimate.time is None:
        return True
    return on_all.estimate.time.step_s / best.estimate.time.step_s - 1 >= WORTH_IDLE_GPUS


def _nothing_fits(
    question: SearchRequest, sets: Sequence[tuple[Device, ...]], goal: Goal, ranked: Sequence[Candidate]
) -> UserError:
    tried = _best_of_each_way(ranked)
    found = remedies(question, sets, goal)
    return UserError(
        "no layout fits on these GPUs (all figures are estimates)",
        problems=[f"{describe(each)}: {each.why_not} ({at_once(each)})" for each in tried[:8]],
        hints=[f"this would fit: {remedy}" for remedy in found] or ["a smaller model, or larger GPUs"],
        exit_code=ExitCode.NO_PLAN_FITS,
    )


def _best_of_each_way(ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the first candidate of each set of devices, strategy and offload."""
    best: dict[object, Candidate] = {}
    for candidate in ranked:
        way = (candidate.devices, candidate.layout.strategy, candidate.layout.offload)
        best.setdefault(way, candidate)
    return tuple(best.values())


def _finished(
    job: Job,
    layout: Layout,
    choices: dict[str, Choice[Any]],
    warnings: Sequence[str],
    devices: tuple[Device, ...],
    *,
    estimate: Estimate | None = None,
    no_estimate: str | None = None,
    ranked: tuple[Candidate, ...] = (),
) -> tuple[Job, Plan]:
    asked = job.train.learning_rate
    if asked == "auto":
        default = _usual_rate(job)
        asked = default.value
        if job.script is None or "learning_rate" in names_in(job.script):
            choices = choices | {RATE: default}
    settled = {"global_batch_size": layout.global_batch_size, "learning_rate": asked}
    train = job.train.model_copy(update=settled)
    job = job.model_copy(update={"train": train})
    rate, base = asked, train.lr_scaling_base
    if train.lr_scaling != "none":
        assert base is not None
        rate = scaled_learning_rate(rate, base, train.global_batch_size, train.lr_scaling)
    advice = learning_rate_advice(asked, base, train.global_batch_size, train.lr_scaling)
    return job, Plan(
        layout=layout,
        learning_rate=rate,
        choices=choices,
        warnings=tuple(warnings),
        advice=tuple(advice),
        devices=devices,
        estimate=estimate,
        no_estimate=no_estimate,
        ranked=ranked,
    )


def _usual_rate(job: Job) -> Choice[float]:
    """Return the usual peak learning rate of the job's method, with who used it.

    Adapters learn at about ten times the rate of the weights themselves: Dettmers et al., "QLoRA", arXiv 2305.14314,
    table 9, take 2e-4 up to 13B parameters; Stanford's Alpaca trained all of LLaMA-7B at 2e-5; Touvron et al.,
    "LLaMA", arXiv 2302.13971, table 2, made 7B and 13B from nothing at 3e-4.
    """
    if job.method.type != "full":
        return Choice(RATE_OF_ADAPTERS, f"usual for {job.method.type}: QLoRA's authors take it up to 13B parameters")
    if job.model.from_scratch is not None:
        return Choice(RATE_FROM_SCRATCH, "usual for a model from scratch: LLaMA's authors take it for 7B parameters")
    return Choice(RATE_OF_ALL_WEIGHTS, "usual for training all weights: Stanford's Alpaca takes it for 7B parameters")


def _device(device: Device) -> dict[str, Any]:
    return {"name": device.name, "model": gpu_model(device), "node": device.node, "index": device.index}


def _as_data(candidate: Candidate) -> dict[str, Any]:
    layout, estimate = candidate.layout, candidate.estimate
    return {
        "devices": describe(candidate),
        "gpus": len(candidate.devices),
        "strategy": layout.strategy,
        "offload": layout.offload,
        "micro_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "gradient_checkpointing": layout.gradient_checkpointing,
        "sync_each_micro_batch": layout.sync_each_micro_batch,
        "precision": layout.precision,
        "peak_gib": round(estimate.peak_bytes / GIB, 3),
        "capacity_gib": None if estimate.capacity is None else round(estimate.capacity.total_bytes / GIB, 3),
        "host_gib": None if estimate.host is None else round(estimate.host.node_bytes / GIB, 3),
        "step_s": None if estimate.time is None else estimate.time.step_s,
        "run_s": None if estimate.run is None else estimate.run.run_s,
        "gpu_hours": None if estimate.run is None else estimate.run.gpu_hours,
        "confirmed": candidate.confirmed,
        "rejected": candidate.why_not,
    }

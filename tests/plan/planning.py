"""Plans on GPUs that are only written down, as `trainwright plan` makes them."""

from __future__ import annotations

from trainwright.job.loading import load_job
from trainwright.launch.planning import PlanFlags, plan_job
from trainwright.plan.choose import Plan
from trainwright.plan.explain import explain


def planned(job: str, gpus: str, *overrides: str, goal: str = "soonest", samples: int | None = None) -> Plan:
    """Return the plan of a job file or preset."""
    return plan_job(load_job(job, overrides), PlanFlags(gpus=gpus, goal=goal, samples=samples))[1]


def told(job: str, gpus: str, *overrides: str, goal: str = "soonest", samples: int | None = None) -> str:
    """Return what the command prints of it."""
    found, plan, amount = plan_job(load_job(job, overrides), PlanFlags(gpus=gpus, goal=goal, samples=samples))
    return "\n".join(explain(found, plan, amount))

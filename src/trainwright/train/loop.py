"""The step loop: one global batch after the other, with evaluation, checkpoints and a clean stop in between."""

from __future__ import annotations

import hashlib
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainwright.errors import ExitCode, UserError
from trainwright.job.batch_schedule import Batch, BatchSchedule, Position
from trainwright.job.learning_rate import LearningRate
from trainwright.job.schema import Job
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append
from trainwright.train.assignment import Assignment
from trainwright.train.balance import Balance
from trainwright.train.console import StepLine, StepPace, memory_gib, say
from trainwright.train.data.dataset import TokenDataset
from trainwright.train.data.order import epoch_order
from trainwright.train.evaluation import evaluate, rehearse
from trainwright.train.feeding import Feed
from trainwright.train.measuring import Measuring
from trainwright.train.memory import RunningOut
from trainwright.train.precision import autocast
from trainwright.train.ranks import Ranks
from trainwright.train.saving import Best, save_checkpoint
from trainwright.train.step_timer import Sections
from trainwright.train.stopping import StopRequest
from trainwright.train.strategies.protocol import Strategy
from trainwright.train.tasks.protocol import Task
from trainwright.train.tracking import Tracking


@dataclass
class StepLoop:
    """All that a run's steps need; `position`, `best` and `eval_due` are where it stands.

    `order` is the order of the samples in one epoch, after the number of that epoch.
    """

    job: Job
    folder: RunFolder
    assignment: Assignment
    ranks: Ranks
    stop: StopRequest
    task: Task
    strategy: Strategy
    train_data: TokenDataset
    eval_data: TokenDataset | None
    course: BatchSchedule
    curve: LearningRate
    contract: dict[str, Any]
    tracking: Tracking | None
    measuring: Measuring
    sections: Sections
    balance: Balance
    position: Position
    best: Best | None
    eval_due: bool
    order: tuple[int, npt.NDArray[np.int64]] | None = None

    def run(self) -> bool:
        """Train to the end of the course; return False if a stop came first. Either way the last step is saved.

        Raises:
            UserError: the loss or the gradient is no longer finite (nothing was updated in that step), or this rank's
                memory ran out.
        """
        feed = Feed(self.train_data, self.task, self.ranks.device)
        pace = StepPace()
        saved_step = began_at = self.position.step
        try:
            if self.eval_due and self._evaluate(self.position) is None:
                return False
            for batch in self.course.batches(self.position):
                with RunningOut("training", self.ranks.device):
                    stop_asked = self.step(batch, feed, pace)
                self.position = batch.after
                if batch.before.step == began_at:
                    self._rehearse_evaluation()
                last = self.course.is_finished(self.position)
                stop_asked, improved = self._evaluate_after(batch, stop_asked, last)
                saving = stop_asked or last or improved or self.course.is_due(self.job.checkpoint.every, batch)
                if self._rebalance(saving) or saving:
                    self._save()
                    saved_step = self.position.step
                if stop_asked and not (last and not self.eval_due):
                    return False
        finally:
            feed.close()
        assert saved_step == self.position.step, (saved_step, self.position)
        return True

    def step(self, batch: Batch, feed: Feed, pace: StepPace) -> bool:
        """Do one optimizer step; return whether any rank was asked to stop."""
        began_s = time.perf_counter()
        self.sections.enter("data")
        samples = self._samples(batch)
        targets = int(self.train_data.targets[samples].sum())
        learning_rate = self.curve.at(batch.before.samples_seen)
        with self.balance.watching(batch.after.step):
            loss_sum = self._forward_backward(batch, samples, targets, feed)
        loss, stop_votes = self.ranks.sum([loss_sum / targets, float(self.stop.requested)])
        if not math.isfinite(loss):
            raise self._not_finite("loss", batch)
        self.sections.enter("optimizer")
        grad_norm = self.strategy.step(learning_rate, self.job.train.max_grad_norm)
        if not math.isfinite(grad_norm) and self.assignment.precision != "fp16":
            raise self._not_finite("gradient", batch)
        step_s = time.perf_counter() - began_s
        self.sections.enter("other")
        self.sections.did_step(batch.after.step)
        tokens = int(self.train_data.lengths[samples].sum())
        pace.add(step_s)
        self.measuring.add(step_s, tokens)
        self._report(batch, loss, grad_norm, learning_rate, step_s, tokens, pace)
        return stop_votes > 0

    def _samples(self, batch: Batch) -> npt.NDArray[np.int64]:
        if self.order is None or self.order[0] != batch.epoch:
            self.order = (batch.epoch, epoch_order(self.job.train.seed, batch.epoch, len(self.train_data)))
        return self.order[1][batch.start : batch.stop]

    def _forward_backward(self, batch: Batch, samples: npt.NDArray[np.int64], targets: int, feed: Feed) -> float:
        """Accumulate the gradient of the mean loss over all targets of the batch; return this rank's loss sum."""
        collective = self.strategy.passes_are_collective
        lengths = self.train_data.lengths[samples]
        parts = self.balance.split.parts(samples, lengths, spread=collective)[self.assignment.rank]
        last = len(parts) - 1
        # Where ranks communicate in a pass, one without samples goes through it with a sample that counts for nothing.
        needed = [index for index, part in enumerate(parts) if len(part) or index == last or collective]
        shortest = samples[[lengths.argmin()]]
        fed = [parts[index] if len(parts[index]) else shortest for index in needed]
        seed, seen, rank = self.job.train.seed, batch.before.samples_seen, self.assignment.rank
        exact = torch.float32 if self.ranks.device.type == "mps" else torch.float64
        loss_sum = torch.zeros((), dtype=exact, device=self.ranks.device)
        computed = 0
        for index, (_, inputs) in zip(needed, feed.batches(fed), strict=True):
            _seed_micro_step(seed, seen, index, rank)
            computed += next(iter(inputs.values())).numel()
            with self.strategy.micro_step(last=index == last):
                self.sections.enter("forward")
                with autocast(self.ranks.device, self.assignment.precision):
                    loss = self.task.loss_sum(self.strategy.forward, inputs) * float(len(parts[index]) > 0)
                self.sections.enter("backward")
                share = loss / targets
                if self.ranks.world_size > 1 and share.requires_grad:
                    self.sections.communicate_after(share)
                self.strategy.backward(share)
            self.sections.enter("data")
            loss_sum += loss.detach().to(exact)
        self.sections.enter("communication")
        summed = float(loss_sum)
        self.balance.note(computed)
        return summed

    def _evaluate_after(self, batch: Batch, stop_asked: bool, last: bool) -> tuple[bool, bool]:
        """Evaluate where that is due after a step; return whether a stop is asked for by now, and if it is the best."""
        self.eval_due = self.eval_data is not None and (last or self.course.is_due(self.job.eval.every, batch))
        if stop_asked or not self.eval_due:
            return stop_asked, False
        improved = self._evaluate(self.position)
        return improved is None, bool(improved)

    def _evaluate(self, position: Position) -> bool | None:
        """Evaluate; return whether it is the best so far, None if a stop came first."""
        assert self.eval_data is not None
        in_evaluation = RunningOut("evaluation", self.ranks.device)
        with self.measuring.evaluation(), self.sections.within("eval"), in_evaluation:
            outcome = evaluate(
                self.strategy,
                self.task,
                self.eval_data,
                self.ranks,
                self.assignment,
                self.stop,
                self.sections,
                limit=self.job.eval.limit,
            )
        if outcome is None:
            return None
        self.eval_due = False
        improved = self.best is None or outcome.loss < self.best.eval_loss
        if improved:
            self.best = Best(position.step, outcome.loss)
        if self.tracking is not None:
            self.tracking.log("eval", position.step, {"loss": outcome.loss, "perplexity": outcome.perplexity})
            mark = "  (best so far)" if improved else ""
            say(f"eval at step {position.step}: loss {outcome.loss:.4f}, perplexity {outcome.perplexity:.4g}{mark}")
        return improved

    def _rehearse_evaluation(self) -> None:
        """Try the largest pass of an evaluation: should it be too much, one step is lost and not a whole epoch."""
        if self.eval_data is not None:
            in_evaluation = RunningOut("evaluation", self.ranks.device)
            with self.measuring.evaluation(), self.sections.within("eval"), in_evaluation:
                rehearse(
                    self.strategy, self.task, self.eval_data, self.ranks, self.assignment, limit=self.job.eval.limit
                )

    def _rebalance(self, saving: bool) -> bool:
        """Share the next steps otherwise, if that is faster; say whether it is so from here on."""
        change = self.balance.look(self.position.step, saving=saving)
        if change is not None and self.ranks.is_first:
            figures = {"before": change.before.weights, "after": change.after.weights, "gain": change.gain}
            event = {"event": "balanced", "step": self.position.step, **figures, "token_s": change.token_s}
            append(self.folder.events_jsonl, event | {"reason": str(change)})
            say(f"balance: {change}")
        return change is not None

    def _save(self) -> Path:
        began_s = time.perf_counter()
        with self.sections.within("save"), RunningOut("saving", self.ranks.device):
            path = save_checkpoint(
                self.folder,
                self.strategy,
                self.ranks,
                attempt=self.assignment.attempt,
                position=self.position,
                best=self.best,
                eval_due=self.eval_due,
                split=self.balance.split,
                contract=self.contract,
                keep=self.job.checkpoint.keep,
            )
        if self.ranks.is_first:
            save_s = time.perf_counter() - began_s
            append(self.folder.events_jsonl, {"event": "saved", "step": self.position.step, "save_s": save_s})
            say(f"saved {path.name} in {save_s:.2f} s")
        return path

    def _report(
        self, batch: Batch, loss: float, grad_norm: float, lr: float, step_s: float, tokens: int, pace: StepPace
    ) -> None:
        if self.tracking is None:
            return
        step, epoch = batch.after.step, self.course.epochs_done(batch.after)
        total_steps = self.course.total_steps_from(batch.after)
        line = StepLine(
            step=step,
            total_steps=total_steps,
            epoch=epoch,
            loss=loss,
            learning_rate=lr,
            grad_norm=grad_norm,
            tokens_per_s=tokens / step_s,
            step_s=step_s,
            memory_gib=memory_gib(self.ranks.device),
            left_s=pace.left_s(total_steps - step),
        )
        figures = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": lr,
            "epoch": epoch,
            "tokens_per_s": line.tokens_per_s,
            "step_s": step_s,
            "memory_gib": line.memory_gib,
            "samples_seen": batch.after.samples_seen,
        }
        self.tracking.log("train", step, figures)
        if step % self.job.train.logging_steps == 0 or step == total_steps:
            say(str(line))
        if not math.isfinite(grad_norm):
            say(f"step {step}: fp16 overflow, nothing was updated and the loss scale was halved")

    def _not_finite(self, what: str, batch: Batch) -> UserError:
        return UserError(
            f"the {what} is not finite at step {batch.after.step}; no weight was changed in that step",
            hints=[
                "the last checkpoint is sound: lower train.learning_rate or raise train.warmup_steps and go on from it",
                f"epoch {batch.epoch}, samples {batch.start} to {batch.stop} of its order: look for damaged rows",
            ],
            exit_code=ExitCode.FAILED,
        )


def _seed_micro_step(seed: int, samples_seen: int, micro_step: int, rank: int) -> None:
    """Seed all that draws in a micro-batch by its place in the run: no generator is stored for a resume."""
    key = f"{seed}/{samples_seen}/{micro_step}/{rank}".encode()
    value = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)

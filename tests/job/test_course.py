"""The course of a run: every sample once an epoch, wherever it is interrupted and however it goes on."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainwright.errors import UserError
from trainwright.job.batch_schedule import Batch, BatchSchedule, Position
from trainwright.job.schema import Interval, TrainSection

COURSES = st.builds(
    BatchSchedule,
    samples=st.integers(1, 200),
    global_batch_size=st.integers(1, 40),
    drop_last=st.booleans(),
    num_train_epochs=st.one_of(st.integers(1, 4).map(float), st.floats(0.05, 4)),
    max_steps=st.one_of(st.none(), st.integers(1, 60)),
).filter(lambda course: course.steps_per_epoch > 0)


def samples_of(batches: list[Batch], epoch: int) -> list[int]:
    """Return the places in the order of `epoch` that the batches take, in the order they take them."""
    return [place for batch in batches if batch.epoch == epoch for place in range(batch.start, batch.stop)]


@settings(deadline=None, max_examples=300)
@given(COURSES)
def test_batches_partition_each_epoch(course: BatchSchedule) -> None:
    """X-01: each place of an epoch's order once and in order, in whole batches but the last of an epoch."""
    batches = list(course.batches(Position()))
    last = batches[-1].epoch
    for epoch in range(last + 1):
        places = samples_of(batches, epoch)
        assert places == list(range(len(places)))
        assert epoch == last or len(places) == course.samples_per_epoch
    sizes = [batch.stop - batch.start for batch in batches]
    for batch, size in zip(batches, sizes, strict=True):
        assert size == course.global_batch_size or (not course.drop_last and batch.stop == course.samples)
    assert len(batches) == course.total_steps
    assert sum(sizes) == course.total_samples == batches[-1].after.samples_seen


@settings(deadline=None, max_examples=300)
@given(COURSES)
def test_positions_follow_each_other(course: BatchSchedule) -> None:
    """A batch begins where the one before it ended, or at the next epoch; the run is finished after the last alone."""
    batches = list(course.batches(Position()))
    for first, second in itertools.pairwise(batches):
        assert not course.is_finished(first.after)
        assert (second.before.step, second.before.samples_seen) == (first.after.step, first.after.samples_seen)
        assert (second.epoch, second.start) in ((first.epoch, first.stop), (first.epoch + 1, 0))
    assert [batch.after.step for batch in batches] == list(range(1, len(batches) + 1))
    assert course.is_finished(batches[-1].after)
    assert list(course.batches(batches[-1].after)) == []


@settings(deadline=None, max_examples=300)
@given(COURSES, st.data())
def test_an_interruption_changes_no_batch(course: BatchSchedule, data: st.DataObject) -> None:
    """What is left after any step is what would have come."""
    batches = list(course.batches(Position()))
    done = data.draw(st.integers(0, len(batches) - 1))
    assert list(course.batches(batches[done].after)) == batches[done + 1 :]


@settings(deadline=None, max_examples=300)
@given(COURSES, st.integers(1, 40), st.data())
def test_another_global_batch_still_takes_every_sample_once(
    course: BatchSchedule, batch_size: int, data: st.DataObject
) -> None:
    """Contract `every sample once an epoch`: a change of the global batch after any step of whole epochs."""
    course = dataclasses.replace(course, max_steps=None, drop_last=False, num_train_epochs=2.0)
    batches = list(course.batches(Position()))
    done = data.draw(st.integers(0, len(batches) - 1))
    changed = dataclasses.replace(course, global_batch_size=batch_size)
    together = batches[: done + 1] + list(changed.batches(batches[done].after))
    for epoch in range(2):
        assert samples_of(together, epoch) == list(range(course.samples))
    assert together[-1].after.samples_seen == 2 * course.samples == changed.total_samples


@settings(deadline=None, max_examples=1000)
@given(COURSES, st.integers(1, 40), st.data())
def test_harm_12_the_total_after_a_changed_batch_is_the_step_at_which_the_run_ends(
    course: BatchSchedule, batch_size: int, data: st.DataObject
) -> None:
    """Steps done under the old batch and those that the remaining samples need under the new one, wherever it is."""
    changed = dataclasses.replace(course, global_batch_size=batch_size)
    assume(changed.steps_per_epoch > 0)
    batches = list(course.batches(Position()))
    position = batches[data.draw(st.integers(0, len(batches) - 1))].after
    rest = list(changed.batches(position))
    last = rest[-1].after.step if rest else position.step
    assert {changed.total_steps_from(place) for place in [position, *(batch.after for batch in rest)]} == {last}
    assert course.total_steps_from(position) == course.total_steps_from(Position()) == course.total_steps


@settings(deadline=None, max_examples=300)
@given(COURSES, st.integers(1, 40), st.data())
def test_another_global_batch_never_repeats_a_sample(
    course: BatchSchedule, batch_size: int, data: st.DataObject
) -> None:
    """Also with drop_last, fractions of epochs or max_steps: no sample twice in an epoch, none left out in between."""
    changed = dataclasses.replace(course, global_batch_size=batch_size)
    assume(changed.steps_per_epoch > 0)
    batches = list(course.batches(Position()))
    done = data.draw(st.integers(0, len(batches) - 1))
    together = batches[: done + 1] + list(changed.batches(batches[done].after))
    for epoch in range(together[-1].epoch + 1):
        places = samples_of(together, epoch)
        assert places == list(range(len(places)))


@pytest.mark.parametrize(
    ("epochs", "steps"), [(0.5, 5), (0.7, 7), (0.1, 1), (0.05, 1), (1.0, 10), (2.25, 23), (0.3, 3), (2.9, 29)]
)
def test_fractions_of_epochs(epochs: float, steps: int) -> None:
    """Fractions are whole steps, rounded up; 0.7 x 10 is 7 although binary arithmetic says a hair more."""
    course = BatchSchedule(samples=80, global_batch_size=8, drop_last=False, num_train_epochs=epochs, max_steps=None)
    assert course.total_steps == steps == len(list(course.batches(Position())))


def test_max_steps_wins_over_epochs() -> None:
    """As in TrainingArguments; the course goes on through as many epochs as it takes."""
    course = BatchSchedule.of(TrainSection(global_batch_size=8, num_train_epochs=1.0, max_steps=25), samples=84)
    batches = list(course.batches(Position()))
    assert (len(batches), batches[-1].epoch, batches[-1].stop) == (25, 2, 24)


def test_a_course_without_a_step_is_refused() -> None:
    """X-01: drop_last with fewer samples than a batch has would train on nothing."""
    with pytest.raises(UserError, match="7 samples do not fill one batch") as refusal:
        BatchSchedule.of(TrainSection(global_batch_size=8, drop_last=True), samples=7)
    assert any("train.drop_last=false" in hint for hint in refusal.value.hints)


def due_steps(course: BatchSchedule, every: str) -> list[int]:
    interval = Interval.parse(every)
    assert isinstance(interval, Interval)
    return [batch.after.step for batch in course.batches(Position()) if course.is_due(interval, batch)]


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        ("1 epoch", [11, 22]),
        ("0.5 epochs", [6, 11, 17, 22]),
        ("0.25 epochs", [3, 6, 8, 11, 14, 17, 19, 22]),
        ("2 epochs", [22]),
        ("1.5 epochs", [17]),
        ("8 steps", [8, 16]),
        ("100 steps", []),
    ],
)
def test_intervals_are_due_once_where_they_are_reached(every: str, steps: list[int]) -> None:
    """S2-22, T: an epoch of 84 samples in batches of 8 is 11 steps; a fraction is due with the step that reaches it."""
    course = BatchSchedule(samples=84, global_batch_size=8, drop_last=False, num_train_epochs=2.0, max_steps=None)
    assert due_steps(course, every) == steps


def test_an_epoch_whose_rest_is_dropped_is_due_at_its_last_step() -> None:
    """X-01: with drop_last an epoch of 84 samples is 10 steps."""
    course = BatchSchedule(samples=84, global_batch_size=8, drop_last=True, num_train_epochs=2.0, max_steps=None)
    assert due_steps(course, "1 epoch") == [10, 20]
    assert due_steps(course, "0.5 epochs") == [5, 10, 15, 20]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 10))
def test_tenths_of_an_epoch_end_with_the_epoch(samples: int, batch: int, parts: int) -> None:
    """Whatever the rounding of 1/parts, something is due at the end of each epoch and at most `parts` times in it."""
    course = BatchSchedule(samples, batch, drop_last=False, num_train_epochs=3.0, max_steps=None)
    interval = Interval(value=1 / parts, unit="epoch")
    due = [batch for batch in course.batches(Position()) if course.is_due(interval, batch)]
    for epoch in range(3):
        assert sum(batch.epoch == epoch for batch in due) == min(parts, course.steps_per_epoch)
        assert any(batch.epoch == epoch and batch.stop == samples for batch in due)


@pytest.mark.parametrize("text", ["1 epoch", "0.5 epochs", "200 steps", "10000000 steps", "0.00001 epochs"])
def test_an_interval_is_written_as_it_was_read(text: str) -> None:
    """T-15: the resolved job is read again at a resume, also where it counts in millions."""
    assert str(Interval.parse(text)) == text

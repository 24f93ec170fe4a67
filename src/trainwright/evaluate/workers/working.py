"""One worker: its engine, its retriever, and the questions that the command's queue gives it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.evaluate.batch_loop import Means, drive
from trainwright.evaluate.engines.engine import Engine, EngineSettings
from trainwright.evaluate.engines.opening import open_engine
from trainwright.evaluate.episode import Episode
from trainwright.evaluate.mdp import DecisionProcess, Sigma
from trainwright.evaluate.metrics import Record
from trainwright.evaluate.plugin_class import own_class
from trainwright.evaluate.policy_names import strategy
from trainwright.evaluate.results import Lines
from trainwright.evaluate.retrieval.bm25 import Bm25Index, Coverage
from trainwright.evaluate.retrieval.retriever import open_retriever
from trainwright.evaluate.worker_protocol import Wire, question_of


def work(wire: Wire) -> None:
    """Answer questions, a line on disk for each before it is told, until the command has no more."""
    messages = wire.messages()
    begin = next(messages)
    process = DecisionProcess(**{**begin["process"], "sigma": Sigma(begin["process"]["sigma"])})
    strategies = {name: strategy(name, process) for name in begin["strategies"]}
    lines, writer = Lines(Path(begin["results"])), begin["writer"]
    retriever = open_retriever(begin["retrieval"]) if begin["retrieval"] else None
    covers = Coverage(Bm25Index(Path(begin["retrieval"]["folder"]))) if begin["success"] == "covered" else None
    engine = _engine(EngineSettings.from_json(begin["engine"]))
    sent_notes: list[str] = []

    def more(room: int) -> list[Episode]:
        notes = [f"engine: {engine.name}", *engine.notes]
        if notes != sent_notes:
            wire.send({"notes": notes})
            sent_notes[:] = notes
        if not room:
            return []
        wire.send({"want": room, "idle": room == begin["at_once"]})
        items: Sequence[Any] = next(messages, {"items": ()})["items"]
        return [Episode(question_of(asked), strategies[name], process, begin["seed"]) for name, asked in items]

    def ended(record: Record) -> None:
        lines.append(writer, record)
        wire.send({"done": [record["strategy"], record["question_id"]]})

    means = Means(
        engine,
        retriever,
        passages=begin["passages"],
        max_new_tokens=begin["max_new_tokens"],
        prompt_template=begin["prompt_template"],
        covers=covers,
    )
    drive(more, means, ended, at_once=begin["at_once"])
    engine.close()


def _engine(settings: EngineSettings) -> Engine:
    if ":" not in settings.engine:
        return open_engine(settings)
    own: Engine = own_class("engine", settings.engine, "generate")(settings)
    return own

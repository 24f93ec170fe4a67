"""What the demo leaves behind: one folder with its data, its two job files and the runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainwright.demo.data import brief_rows, held_out_questions, training_rows
from trainwright.errors import ExitCode, UserError
from trainwright.runs.folder import RunFolder

TRAINING_ROWS = 20_000
BRIEF_ROWS = 3_000
QUESTIONS = 200
FACTS_IN_A_QUESTION = 3
STEPS = 800

_BASE_JOB = """\
# A small language model that answers questions on little stories, from nothing, on two CPU processes.
# Made by `trainwright demo`. `trainwright config show` on this file tells all that it leaves to its default.
name: demo
output_dir: {folder}
model:
  from_scratch:
    # Three layers: the first sees the words just before, the other two look back over the whole text.
    architecture: lfm2
    dimensions:
      layer_types: [conv, full_attention, full_attention]
      hidden_size: 64
      intermediate_size: 128
      block_auto_adjust_ff_dim: false
      num_hidden_layers: 3
      num_attention_heads: 4
      num_key_value_heads: 4
      max_position_embeddings: 256
      tie_word_embeddings: true
      initializer_range: 0.09
  tokenizer: {{vocab_size: 512}}      # trained on the stories
data:
  path: {stories}
  max_length: 128
  cache_dir: {cache}
train:
  global_batch_size: 32             # examples in one step, over both processes
  micro_batch_size: 16
  max_steps: {steps}
  learning_rate: 2e-3
  lr_scheduler_type: cosine
  min_lr_ratio: 0.05
  warmup_steps: 50
  adam_beta2: 0.98
  logging_steps: 50
  seed: {seed}
checkpoint: {{every: 250 steps, keep: 2}}
resources: {{device: cpu, ranks: 2, strategy: ddp, precision: fp32}}
"""

_LORA_JOB = """\
# LoRA on the model that `trainwright demo` made: it learns to answer in short, without the name.
name: demo-lora
output_dir: {folder}
model:
  name: {model}
data:
  path: {brief}
  max_length: 128
  cache_dir: {cache}
method: {{type: lora, r: 8, alpha: 16}}
train:
  global_batch_size: 32
  micro_batch_size: 32
  max_steps: 150
  learning_rate: 4e-3
  lr_scheduler_type: cosine
  warmup_steps: 10
  logging_steps: 25
  seed: {seed}
resources: {{device: cpu, precision: fp32}}
"""


class DemoFolder:
    """The folder of one demo and every path in it, all absolute."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        self.run = RunFolder(self.path / "demo")
        self.lora_run = RunFolder(self.path / "demo-lora")

    @property
    def stories(self) -> Path:
        return self.path / "stories.jsonl"

    @property
    def brief(self) -> Path:
        return self.path / "brief_answers.jsonl"

    @property
    def questions(self) -> Path:
        return self.path / "questions.jsonl"

    @property
    def answers(self) -> Path:
        return self.path / "answers.jsonl"

    @property
    def answers_log(self) -> Path:
        return self.path / "answers.log"

    @property
    def base_job(self) -> Path:
        return self.path / "demo.yaml"

    @property
    def lora_job(self) -> Path:
        return self.path / "demo-lora.yaml"

    def write(self, seed: int) -> None:
        """Write data and job files, over those of a former demo.

        Raises:
            UserError: the folder cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _write_rows(self.stories, training_rows(seed, TRAINING_ROWS))
            _write_rows(self.brief, brief_rows(seed, BRIEF_ROWS))
            _write_rows(self.questions, _question_rows(seed))
            for path, template in ((self.base_job, _BASE_JOB), (self.lora_job, _LORA_JOB)):
                path.write_text(template.format(steps=STEPS, seed=seed, **self._quoted_paths()), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"the demo cannot be written to {self.path}: {error.strerror}",
                hints=["choose another folder with --output-dir"],
                exit_code=ExitCode.STORAGE,
            ) from error

    def _quoted_paths(self) -> dict[str, str]:
        """Return paths as JSON strings, which YAML reads; absolute ones, so that a job file works from every folder."""
        paths = {
            "folder": self.path,
            "stories": self.stories,
            "brief": self.brief,
            "cache": self.path / "cache",
            "model": self.run.final_model_dir,
        }
        return {name: json.dumps(str(path), ensure_ascii=False) for name, path in paths.items()}


def _question_rows(seed: int) -> Iterable[Mapping[str, object]]:
    for with_story in (True, False):
        for question in held_out_questions(seed, QUESTIONS, facts=FACTS_IN_A_QUESTION):
            yield {
                "prompt": question.prompt(with_story=with_story),
                "story": question.story if with_story else None,
                "question": question.question,
                "right_answer": question.answer,
            }


def _write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

"""`python -m trainwright.train.answer_prompts MODEL PROMPTS ANSWERS`: what a model answers to each prompt of a file.

MODEL is a folder such as `final_model` (a causal language model, or an adapter on one), PROMPTS a jsonl file whose
rows have a `prompt`. ANSWERS gets the same rows with the model's `answer` beside: the likeliest token each time, up to
the end of the answer or 64 tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from trainwright.errors import ExitCode, UserError
from trainwright.model_folder import loading_errors, require_safe
from trainwright.runs.kill_domain import die_with_launcher
from trainwright.train.data.tokenizer import ensure_pad_token, load_tokenizer

BATCH_SIZE = 50
MOST_NEW_TOKENS = 64


def answer_file(model_dir: Path, prompts: Path, answers: Path) -> None:
    """Write the rows of `prompts` to `answers`, each with the model's answer.

    Raises:
        UserError: there is no such model, or a row without a prompt.
    """
    rows = _read_rows(prompts)
    model, tokenizer = _load(model_dir)
    with answers.open("w", encoding="utf-8") as file:
        for row, answer in zip(rows, generate(model, tokenizer, [row["prompt"] for row in rows]), strict=True):
            file.write(json.dumps(row | {"answer": answer}, ensure_ascii=False) + "\n")


def generate(model: Any, tokenizer: Any, prompts: Sequence[str]) -> Iterator[str]:
    """Yield the greedy answer to each prompt, without special tokens and the space around it."""
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = tokenizer(
            [_as_asked(prompt, tokenizer) for prompt in prompts[start : start + BATCH_SIZE]],
            add_special_tokens=not tokenizer.chat_template,
            return_tensors="pt",
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
        )
        with torch.inference_mode():
            tokens = model.generate(
                **batch, max_new_tokens=MOST_NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        new_tokens = tokens[:, batch["input_ids"].shape[1] :]
        yield from (text.strip() for text in tokenizer.batch_decode(new_tokens, skip_special_tokens=True))


def main(arguments: list[str]) -> int:
    """Answer the prompts of a file and return the exit code; errors go to stderr."""
    if len(arguments) != 3:
        print("usage: python -m trainwright.train.answer_prompts MODEL PROMPTS ANSWERS", file=sys.stderr)
        return ExitCode.USAGE
    die_with_launcher()
    try:
        answer_file(*map(Path, arguments))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    return ExitCode.DONE


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"the prompts cannot be read from {path}: {error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise UserError(f'{path}: row {number} has no prompt; write {{"prompt": "..."}}')
    return rows


def _as_asked(prompt: str, tokenizer: Any) -> str:
    """Return the prompt in the chat template, where the tokenizer has one: in that the model was trained."""
    if not tokenizer.chat_template:
        return prompt
    message = [{"role": "user", "content": prompt}]
    return str(
        tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    )


def _load(model_dir: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    require_safe(str(model_dir))
    tokenizer = load_tokenizer(str(model_dir))
    ensure_pad_token(tokenizer)
    try:
        model = AutoModelForCausalLM.from_pretrained(model_dir, use_safetensors=True, trust_remote_code=False)
    except loading_errors() as error:
        raise UserError(
            f"no causal language model can be loaded from {model_dir}: {str(error).strip().splitlines()[0]}",
            hints=["name the final_model folder of a finished run"],
            exit_code=ExitCode.MISSING,
        ) from error
    model.eval()
    return model, tokenizer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

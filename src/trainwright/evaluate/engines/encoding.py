"""Prompts as tokens: in the model's chat template where it has one, and never longer than the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainwright.errors import UserError


@dataclass
class Encoder:
    """A tokenizer, whether its chat template is used, and how many tokens the model reads (None: no limit known)."""

    tokenizer: Any
    chat_template: bool | Literal["auto"]
    longest: int | None
    cut: int = field(default=0, init=False)
    """Prompts so far that were too long: their beginnings were left out."""

    def __post_init__(self) -> None:
        has_one = bool(self.tokenizer.chat_template)
        if self.chat_template is True and not has_one:
            raise UserError(
                "chat_template is asked for, and the model's tokenizer has none", hints=["chat_template=auto"]
            )
        self.as_chat = has_one and self.chat_template is not False
        self._special = sorted(set(self.tokenizer.all_special_tokens), key=len, reverse=True)

    @property
    def notes(self) -> list[str]:
        """What was chosen, and how many prompts were cut."""
        template = "the tokenizer's chat template" if self.as_chat else "plain text, no chat template"
        notes = [f"prompts: {template}"]
        if self.cut:
            notes.append(f"{self.cut:,} prompts were longer than the model reads; their beginnings were left out")
        return notes

    def encode(self, prompts: Sequence[str], max_new_tokens: int) -> list[list[int]]:
        """Return the tokens of each prompt; of one too long the end, which holds the question.

        Raises:
            UserError: the answer alone is as long as all that the model reads.
        """
        texts = [self._text(prompt) for prompt in prompts]
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=not self.as_chat)["input_ids"]
        if self.longest is None:
            return encoded
        room = self.longest - max_new_tokens
        if room < 1:
            raise UserError(
                f"answers of {max_new_tokens} tokens leave no room for a prompt: the model reads {self.longest} tokens",
                hints=["a smaller max_new_tokens"],
            )
        self.cut += sum(len(tokens) > room for tokens in encoded)
        return [tokens[-room:] for tokens in encoded]

    def is_full(self, tokens: Sequence[int], max_new_tokens: int) -> bool:
        """Whether a prompt is as long as can be, so that its beginning may be missing."""
        return self.longest is not None and len(tokens) >= self.longest - max_new_tokens

    def _text(self, prompt: str) -> str:
        # What was retrieved must not end its own turn: a special token inside a text is set apart by a space.
        for token in self._special:
            prompt = prompt.replace(token, f"{token[:1]} {token[1:]}")
        if not self.as_chat:
            return prompt
        # A model that thinks aloud first (Qwen3's template has the switch) would not come to its answer.
        message = [{"role": "user", "content": prompt}]
        text: str = self.tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return text

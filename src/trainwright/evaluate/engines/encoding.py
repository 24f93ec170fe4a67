"""Prompts as tokens, in the chat template where the model has one and never longer than it reads; answers as texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainwright.errors import UserError
from trainwright.evaluate.thinking import CHANNEL_MARKERS, MARKERS, opened_by, without_thinking


@dataclass
class PromptEncoder:
    """A tokenizer, whether its chat template is used, and how many tokens the model reads (None: no limit known)."""

    tokenizer: Any
    chat_template: bool | Literal["auto"]
    longest: int | None
    cut: int = field(default=0, init=False)
    """Prompts so far that were too long: their beginnings were left out."""
    unfinished: int = field(default=0, init=False)
    """Answers so far that ended in the middle of the model's thinking."""

    def __post_init__(self) -> None:
        has_one = bool(self.tokenizer.chat_template)
        if self.chat_template is True and not has_one:
            raise UserError(
                "chat_template is asked for, and the model's tokenizer has none", hints=["chat_template=auto"]
            )
        self.as_chat = has_one and self.chat_template is not False
        self._special = sorted(set(self.tokenizer.all_special_tokens), key=len, reverse=True)
        special = {number: str(token) for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        # Where these are special tokens, leaving them out would leave thinking that nothing tells from the answer.
        self._kept = set(special.values()) & {*MARKERS, *CHANNEL_MARKERS}
        self._left_out = {number for number, text in special.items() if text not in self._kept}
        self._opened = opened_by(self._text("?")) if self.as_chat else ""

    @property
    def notes(self) -> list[str]:
        """What was chosen, and how many prompts were cut."""
        template = "the tokenizer's chat template" if self.as_chat else "plain text, no chat template"
        notes = [f"prompts: {template}"]
        if self.cut:
            notes.append(f"{self.cut:,} prompts were longer than the model reads; their beginnings were left out")
        if self.unfinished:
            notes.append(
                f"{self.unfinished:,} answers ended before the model's thinking did, which is no answer: "
                "a larger max_new_tokens"
            )
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

    def decode(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """Return each answer as text without special tokens, save those around thinking, and count the unfinished.

        Where the chat template opens the thinking at the end of the prompt, its tag stands before the text.
        """
        if self._kept:
            answers = [[token for token in answer if token not in self._left_out] for answer in answers]
        decoded = self.tokenizer.batch_decode(answers, skip_special_tokens=not self._kept)
        texts = [self._opened + text for text in decoded]
        self.unfinished += sum(bool(text.strip()) and not without_thinking(text) for text in texts)
        return texts

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

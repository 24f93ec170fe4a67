"""`data.template`: what stands around a prompt, and between it and its answer.

    chat     the tokenizer's chat template, the prompt as the user's message and the answer as the assistant's
    plain    the prompt, a line break, the answer
    none     the prompt and the answer, nothing between them
    "..."    a text of the user's own with {prompt} in it, after which the answer follows

The model that is trained must be asked in the same way, so its tokenizer is saved with a chat template that says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trainwright.errors import UserError

TEXTS = {"plain": "{prompt}\n", "none": "{prompt}"}
_FIELD = "{prompt}"


@dataclass(frozen=True)
class Template:
    """The template of a run, and why it is this one.

    `text` holds `{prompt}`; None is the tokenizer's chat template. `begins` is what a text of the tokenizer begins
    with, empty where it begins with nothing.
    """

    value: str
    reason: str
    text: str | None
    begins: str = ""

    def before_answer(self, prompt: str) -> str:
        """Return the text that the answer follows; there is none for `chat`, which the tokenizer renders."""
        assert self.text is not None
        return self.begins + self.text.replace(_FIELD, prompt)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `chat_template` is the one that the trained model's tokenizer gets, None for none.

        It is left out where the tokenizer keeps its own.
        """
        told = {"value": self.value, "reason": self.reason}
        if self.text is None:
            return told
        return told | {"text": self.text, "chat_template": None if self.value == "none" else self._as_jinja()}

    def _as_jinja(self) -> str:
        assert self.text is not None
        before, after = (json.dumps(part, ensure_ascii=False) for part in self.text.split(_FIELD))
        return (
            f"{'{{ bos_token }}' if self.begins else ''}{{% for message in messages %}}"
            "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
            f"{{% else %}}{{{{ {before} + message['content'] + {after} }}}}{{% endif %}}{{% endfor %}}"
        )


def choose_template(asked: str, tokenizer: Any, *, without_one: str, begins: str = "") -> Template:
    """Return the template that `data.template` asks for; `without_one` is for a tokenizer without a chat template.

    Raises:
        UserError: the chat template is asked for, and the tokenizer has none.
    """
    has_one = bool(tokenizer.chat_template)
    if asked == "chat" and not has_one:
        raise UserError(
            "data.template=chat: the tokenizer has no chat template",
            hints=["data.template=plain", "or model.tokenizer names one that has a chat template"],
        )
    value, reason = asked, "given"
    if asked == "auto":
        value = "chat" if has_one else without_one
        reason = f"the tokenizer has {'a' if has_one else 'no'} chat template"
    return Template(value, reason, None if value == "chat" else TEXTS.get(value, value), begins)

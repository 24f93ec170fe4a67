"""What a model writes before its answer: thinking, which is no answer, however much it reads like one.

<think>The answer is 1?</think> 4              "4"; also <thinking> and Mistral's [THINK]
The answer is 1?</think> 4                     "4": the chat template opened the thinking, in the prompt
<think>The answer is 1                         "": cut off before the answer
<|channel|>analysis<|message|>1?<|end|>...     gpt-oss: only what it says in its final channel
analysis1?assistantfinal4                      the same with special tokens left out: "4"
"""

from __future__ import annotations

import re
from typing import Final

MARKERS: Final = ("<think>", "</think>", "<thinking>", "</thinking>", "[THINK]", "[/THINK]")
"""Tags around thinking. What Qwen3, DeepSeek-R1 and Magistral write, and what other models are asked to."""
CHANNEL_MARKERS: Final = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>")
"""Of OpenAI's harmony format (github.com/openai/harmony), which gpt-oss writes."""
_OPEN = r"(?:<think(?:ing)?>|\[THINK\])"
_CLOSE = r"(?:</think(?:ing)?>|\[/THINK\])"
_CLOSED = re.compile(rf"{_OPEN}.*?{_CLOSE}", re.DOTALL | re.IGNORECASE)
_UP_TO_CLOSE = re.compile(rf".*{_CLOSE}", re.DOTALL | re.IGNORECASE)
_UNCLOSED = re.compile(_OPEN, re.IGNORECASE)
_OPEN_AT_END = re.compile(rf"{_OPEN}\s*\Z", re.IGNORECASE)
_CHANNEL = re.compile(
    r"<\|channel\|>\s*(?P<name>\w+).*?<\|message\|>(?P<text>.*?)(?=<\|(?:channel|start|end|return|call)\|>|\Z)",
    re.DOTALL,
)
_BARE_CHANNEL = re.compile(r"\Aanalysis(?:.*assistantfinal|(?=[A-Z\"'(]).*)", re.DOTALL)


def without_thinking(response: str) -> str:
    """Return what a response says outside its thinking; empty where it was cut off before the thinking ended."""
    if "<|channel|>" in response:
        channels = _CHANNEL.finditer(response)
        return "\n".join(said["text"].strip() for said in channels if said["name"] == "final")
    said = _UP_TO_CLOSE.sub("", _CLOSED.sub("", _BARE_CHANNEL.sub("", response)))
    return "" if _UNCLOSED.search(said) else said.strip()


def opened_by(prompt: str) -> str:
    """Return the tag by which a prompt opens the thinking that the response goes on with; empty where it opens none."""
    tag = _OPEN_AT_END.search(prompt)
    return tag[0].strip() if tag else ""

"""Random models of a few thousand weights with a tokenizer of bytes, saved as folders for the engines to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|turn|>"]
_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_DIMENSIONS: dict[str, dict[str, Any]] = {
    "qwen2": _COMMON,
    # A window, a state carried from token to token, learned positions: each keeps its past in another way.
    "mistral": {**_COMMON, "sliding_window": 16},
    "lfm2": {**_COMMON, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024},
}


def save_model(folder: Path, family: str = "qwen2", **generation: Any) -> Path:
    """Write a random model that is sure enough of its words for them to differ from prompt to prompt."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = bytes_tokenizer()
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **special, **_DIMENSIONS[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def bytes_tokenizer() -> Any:
    """Return a tokenizer whose words are the bytes of a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(SPECIAL + alphabet)}, []))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=["<|turn|>"],
    )


def plain_answers(folder: Path, prompts: list[str], max_new_tokens: int) -> list[tuple[list[int], float]]:
    """Return new tokens and the first one's probability by transformers' plain loop, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.inference_mode():
            first = model(input_ids=ids).logits[0, -1].softmax(-1).max().item()
            tokens = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
            )
        answers.append((tokens[0, ids.shape[1] :].tolist(), first))
    return answers

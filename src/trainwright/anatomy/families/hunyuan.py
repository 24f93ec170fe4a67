"""Hunyuan (dense): Llama with norms of each head of queries and keys, behind their rotation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainwright.anatomy.families.blocks import by_name
from trainwright.anatomy.families.llama import LLAMA, LlamaConfig
from trainwright.anatomy.family import HeadNorms


@dataclass(frozen=True, kw_only=True)
class HunYuanDenseV1Config(LlamaConfig):
    """`configuration_hunyuan_v1_dense.py`."""

    model_type = "hunyuan_v1_dense"
    vocab_size: int = 290943


RECORDS: Final = by_name(
    replace(
        LLAMA,
        config=HunYuanDenseV1Config,
        head_norms=HeadNorms("query_layernorm", "key_layernorm", behind_rotation=True),
        mlp_bias=False,
    )
)

"""Which kernel an attention takes, as far as its time depends on it, and what it computes."""

from __future__ import annotations

from typing import Final, Literal

from trainwright.anatomy.flops import Kernel, Masked
from trainwright.anatomy.parts import Anatomy, Attention
from trainwright.estimate.closed.attention import AttentionShape, kernel_of
from trainwright.estimate.request import Request
from trainwright.estimate.time.kernels import FusedAttention
from trainwright.estimate.time.rates import Speed

AttentionTime = FusedAttention | Literal["scores"]
"""`scores`: they are written out, by transformers' own attention or by torch's plain one."""
_TIMES: Final[dict[str, AttentionTime]] = {
    "cudnn": "cudnn",
    "flash": "flash",
    "efficient": "efficient",
    "math": "scores",
}


def attention_kernel(
    anatomy: Anatomy, request: Request, speed: Speed, attention: Attention, length: int
) -> AttentionTime:
    """Return what computes this attention on this GPU."""
    wanted = anatomy.attention_for(request.attention)
    if wanted in ("eager", "math"):
        return "scores"
    element = 4 if (request.precision if request.autocast else request.base_dtype) == "fp32" else 2
    if wanted == "flash_attention_2" or speed.capability is None:
        return "flash" if element == 2 else "efficient"
    masked = takes_mask(request, attention, length)
    key_heads = attention.heads if masked else attention.key_value_heads  # repeated where there is a mask
    shape = AttentionShape(1, attention.heads, key_heads, attention.head_dim, length, length)
    kernel = kernel_of(wanted, element, request.precision, speed.capability, shape, masked=masked, grouped=not masked)
    if kernel == "cudnn" and adds_bias(anatomy, attention) and request.method.type == "full":
        return "efficient"  # cuDNN takes no bias that is trained
    return _TIMES[kernel]


def adds_bias(anatomy: Anatomy, attention: Attention) -> bool:
    """Whether learned numbers are added to the scores, as in T5's self-attention."""
    return anatomy.family.positions == "buckets" and attention.queries_over == attention.keys_over


def takes_mask(request: Request, attention: Attention, length: int) -> bool:
    """Whether the kernel is given a mask: of padding, of packed documents, or of a window that is not all there is."""
    if request.attention == "flash_attention_2":
        return False
    return request.seen_batch != "full" or (attention.window is not None and attention.window <= length)


def attention_pairs(anatomy: Anatomy, request: Request, speed: Speed, length: int) -> tuple[Kernel, Masked]:
    """Return how the anatomy counts the operations of this attention.

    Pairs of tokens that the mask hides are computed in vain by all but kernels that know no mask but the causal one.
    """
    kinds = {id(s.operations): s for s in anatomy.segments}.values()
    attentions = [o for segment in kinds for o in segment.operations if isinstance(o, Attention)]
    written = any(attention_kernel(anatomy, request, speed, each, length) == "scores" for each in attentions)
    masked = any(takes_mask(request, each, length) for each in attentions)
    return "eager" if written else "fused", "counted" if written or masked else "skipped"

"""Transformers' own tree path: the attention functions that its models call, with a 4-D additive mask."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from ddtree.peers.pytorch import Padded, PaddedAttention


class _Attention(PaddedAttention):
    """One attention function, called as a decoder layer calls it."""

    function: Any

    def attend(self, given: Padded, bias: Tensor, scale: float | None) -> Tensor:
        """Attend."""
        q_heads, head_dim = given.query.shape[1], given.query.shape[3]
        # what the functions read of the layer that they are called for
        layer = SimpleNamespace(
            num_key_value_groups=q_heads // given.key.shape[1], training=False, is_causal=True
        )
        output: Tensor
        output, _ = type(self).function(
            layer, given.query, given.key, given.value, bias,
            dropout=0.0, scaling=head_dim**-0.5 if scale is None else scale,
        )  # fmt: skip
        return output.transpose(1, 2)


class Sdpa(_Attention):
    """``attn_implementation="sdpa"``."""

    function = staticmethod(sdpa_attention_forward)


class Eager(_Attention):
    """``attn_implementation="eager"``."""

    function = staticmethod(eager_attention_forward)

"""Transformers' own tree path: the attention functions that its models call, with a 4-D additive mask."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from ddtree import spec
from ddtree.peers.pytorch import DEVICE, padded


class _Attention:
    """One attention function, called as a decoder layer calls it."""

    mask_forms = ("dense", "flat")
    device = DEVICE
    function: Any

    def verify_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        layout: spec.VerifyLayout,
        mask: spec.TreeMask,
        *,
        scale: float | None = None,
    ) -> Tensor:
        """Attend."""
        given = padded(query, key, value, key_pool, value_pool, layout)
        # what the functions read of the layer that they are called for
        layer = SimpleNamespace(
            num_key_value_groups=query.shape[1] // key.shape[1], training=False, is_causal=True
        )
        bias = spec.convert_mask(mask, layout, "dense").bias.to(query.dtype)
        scaling = query.shape[2] ** -0.5 if scale is None else scale
        output, _ = type(self).function(
            layer, given.query, given.key, given.value, bias, dropout=0.0, scaling=scaling
        )
        return given.rows(output.transpose(1, 2), query)


class Sdpa(_Attention):
    """``attn_implementation="sdpa"``."""

    function = staticmethod(sdpa_attention_forward)


class Eager(_Attention):
    """``attn_implementation="eager"``."""

    function = staticmethod(eager_attention_forward)

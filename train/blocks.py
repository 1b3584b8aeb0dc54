"""Many blocks of many texts in one pass of the draft model, and the loss on what it drafts.

A block stands at an anchor, the place of its root: it sees the text before the root through the target's
features, and itself. That is what ``DFlashDrafter.draft`` computes one block at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ddtree.decoding.dflash_model import Attention, DFlashModel, Layer, rotate

ROWS = 4096
"""Rows of the head computed at once: a row of the vocabulary takes 100 kB."""


def draft_states(
    model: DFlashModel,
    embedding: Float[Tensor, "vocab hidden"],
    token_ids: Int64[Tensor, "B S"],
    features: Float[Tensor, "B S width"],
    anchors: Int64[Tensor, "B A"],
) -> Float[Tensor, "B A horizon hidden"]:
    """States of the mask rows of every block, ready for the target's head.

    Args:
        model: the draft model.
        embedding: the target's table.
        token_ids: ``[B, S]`` texts.
        features: of every entry of the texts.
        anchors: ``[B, A]`` entries that are roots.
    """
    config, size = model.config, model.config.block_size
    root = F.embedding(token_ids.gather(1, anchors), embedding)
    mask = embedding[config.mask_token_id].expand(*anchors.shape, size - 1, -1)
    x = torch.cat([root[:, :, None], mask], dim=2) * config.input_embedding_scale
    context = model.hidden_norm(model.fc(features.to(x.dtype)))
    entries = torch.arange(token_ids.shape[1], device=anchors.device)
    places = anchors[..., None] + torch.arange(size, device=anchors.device)  # [B, A, size]
    at = model.rope(entries, x.dtype)
    # [B, A, size, 1, head_dim]
    inside = tuple(t.unflatten(0, places.shape) for t in model.rope(places.flatten(), x.dtype))
    is_unseen = entries >= anchors[..., None]  # [B, A, S]
    for layer in _layers(model):
        h = layer.input_layernorm(x)
        x = x + _attend(
            layer.self_attn, h, cast("tuple[Tensor, Tensor]", inside), context, at, is_unseen
        )
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return cast("Tensor", model.norm(x[:, :, 1:]))


def _attend(
    attention: Attention,
    x: Float[Tensor, "B A T hidden"],
    inside: tuple[Tensor, Tensor],
    context: Float[Tensor, "B S hidden"],
    at: tuple[Tensor, Tensor],
    is_unseen: Bool[Tensor, "B A S"],
) -> Float[Tensor, "B A T hidden"]:
    """Attention of every block row over [its context ; its block], in two products and one softmax."""
    dim, groups = attention.head_dim, attention.groups
    batch, blocks, size, _ = x.shape
    query = rotate(attention.q_norm(attention.q_proj(x).unflatten(-1, (-1, dim))), inside)
    query = query.unflatten(3, (-1, groups)) * dim**-0.5  # [B, A, T, kv_heads, groups, dim]
    key, value = attention.keys_values(x, inside)  # [B, A, T, kv_heads, dim]
    context_key, context_value = attention.keys_values(context, at)  # [B, S, kv_heads, dim]
    dtype = context_value.dtype

    # one product a text and KV head for the context, one a block and KV head for the block
    rows = query.permute(0, 3, 4, 1, 2, 5).to(dtype)  # [B, kv_heads, groups, A, T, dim]
    far = rows.flatten(2, 4) @ context_key.permute(0, 2, 3, 1).to(dtype)
    far = far.view(batch, -1, groups, blocks, size, far.shape[-1])
    far = far.masked_fill_(is_unseen[:, None, None, :, None], -torch.inf)
    own = query.permute(0, 1, 3, 4, 2, 5).to(dtype)  # [B, A, kv_heads, groups, T, dim]
    near = own.flatten(3, 4) @ key.permute(0, 1, 3, 4, 2).to(dtype)
    near = near.unflatten(3, (groups, size)).permute(0, 2, 3, 1, 4, 5)

    # the dtype is named, so that autocast does not widen what is the largest tensor of the pass
    weights = torch.softmax(torch.cat([far, near], -1), -1, dtype=dtype)
    far_weights, near_weights = weights.split([far.shape[-1], size], -1)
    out = far_weights.flatten(2, 4) @ context_value.transpose(1, 2)
    out = out.view(batch, -1, groups, blocks, size, dim).permute(0, 3, 4, 1, 2, 5)
    mine = near_weights.permute(0, 3, 1, 2, 4, 5).flatten(3, 4) @ value.transpose(2, 3).to(dtype)
    mine = mine.unflatten(3, (groups, size)).permute(0, 1, 4, 2, 3, 5)
    return cast("Tensor", attention.o_proj((out + mine).flatten(3)))


def _layers(model: DFlashModel) -> Iterator[Layer]:
    return (cast("Layer", layer) for layer in model.layers)


def draft_logits(
    model: DFlashModel, head: Float[Tensor, "vocab hidden"], states: Float[Tensor, "*rows hidden"]
) -> Float[Tensor, "*rows vocab"]:
    """What the target's head makes of the states."""
    return F.linear(states.to(head.dtype), head) * model.config.output_multiplier


LabelLoss = Callable[..., tuple[Tensor, Tensor, Tensor]]


def label_loss(
    logits: Float[Tensor, "n vocab"],
    target_logits: Float[Tensor, "n vocab"],
    temperature: Float[Tensor, " n"],
    token: Int64[Tensor, " n"],
    weight: Float[Tensor, " n"],
) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"], Float[Tensor, "n vocab"]]:
    """Cross-entropy with the distribution that the token was drawn from, and its gradient.

    Of sampled text that is the target's at the text's temperature, of greedy text the token itself. The
    mean over texts is the cross-entropy with the tokens; the spread is less.

    Returns:
        The loss of each row, whether the token was the first guess, and weight × gradient by the logits.
    """
    log_probs = torch.log_softmax(logits.float(), -1)
    # a greedy row's temperature only keeps the numbers finite: its label is the token
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    soft = torch.softmax(target_logits.float() / divisor, -1)
    hard = torch.arange(logits.shape[-1], device=logits.device) == token[:, None]
    label = torch.where(temperature[:, None] > 0, soft, hard.float())
    loss = -(label * log_probs).sum(-1)
    first = log_probs.argmax(-1) == token
    return loss, first, ((log_probs.exp() - label) * weight[:, None]).to(logits.dtype)


def head_loss(
    states: Float[Tensor, "n hidden"],
    head: Float[Tensor, "vocab hidden"],
    target_states: Float[Tensor, "n hidden"],
    temperature: Float[Tensor, " n"],
    token: Int64[Tensor, " n"],
    weight: Float[Tensor, " n"],
    compute: LabelLoss = label_loss,
) -> tuple[Float[Tensor, ""], Float[Tensor, " n"], Bool[Tensor, " n"]]:
    """The loss of drafted states through the target's head; the logits are never kept.

    Args:
        states: what was drafted.
        head: the target's.
        target_states: from which the target chose the token.
        temperature: at which it did; 0: greedily.
        token: its choice.
        weight: of each row.
        compute: ``label_loss``, perhaps compiled.

    Returns:
        The sum of weight × loss, which alone has a gradient, and of each row its loss and whether the
        first guess was right.
    """
    out: tuple[Tensor, Tensor, Tensor] = _HeadLoss.apply(  # type: ignore[no-untyped-call] # torch's
        states, head, target_states, temperature, token, weight, compute
    )
    return out


class _HeadLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        head: Tensor,
        target_states: Tensor,
        temperature: Tensor,
        token: Tensor,
        weight: Tensor,
        compute: LabelLoss,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = -(-len(states) // ROWS)
        columns = (states.to(head.dtype), target_states, temperature, token, weight)
        found = []
        for x, y, *labels in zip(*(c.tensor_split(parts) for c in columns), strict=True):
            loss, first, gradient = compute(F.linear(x, head), F.linear(y, head), *labels)
            found.append((loss, first, gradient @ head))
        losses, firsts, gradients = (torch.cat(each) for each in zip(*found, strict=True))
        ctx.save_for_backward(gradients.to(states.dtype))
        ctx.mark_non_differentiable(losses, firsts)
        return (losses * weight).sum(), losses, firsts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        return (saved * gradients[0], *[None] * 6)

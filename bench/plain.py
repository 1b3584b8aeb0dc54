"""One token a round in one CUDA graph: the baseline of ``loop.py`` and ``parts.py``.

The same target, pool and attention kernel as the draft trees', and nothing beside the forward pass but the
layout of one row a request, the argmax and the new length. The host reads one step behind, as the loop does.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree import impl
from ddtree.decoding.paged import PagedTarget
from ddtree.impl.round import Captured
from ddtree.impl.sampling import first_argmax
from ddtree.spec import BitMask, DraftTree


@dataclass(frozen=True)
class PlainRun:
    """Texts of one batch, and the seconds after their prompts."""

    token_ids: list[list[int]]
    seconds: float
    steps: int


class Plain:
    """Greedy decoding of ``max_batch`` requests at once."""

    def __init__(self, target: PagedTarget) -> None:
        """Capture a step; what the target holds is not touched."""
        batch, device = target.max_batch, target.device
        self.target = target
        ones = torch.ones((batch, 1), dtype=torch.int32, device=device)
        zeros = ones - 1
        self.roots = torch.zeros(batch, dtype=torch.int64, device=device)
        self._tree = DraftTree(self.roots[:, None], zeros - 1, zeros, zeros.double(), ones[:, 0])
        self._mask = BitMask(ones)  # a root sees itself
        self._captured: Captured[Tensor] | None = None
        if device.type == "cuda":
            lens = target.prefix_lens.clone()
            self._captured = Captured(self.step, device)
            target.prefix_lens.copy_(lens)  # warming up took a step

    @torch.no_grad()
    def step(self) -> Tensor:
        """One token for each request that is held; the chosen ones."""
        target = self.target
        layout = impl.plan_verify(self._tree, target.prefix_lens, target.slot_table)
        chosen = first_argmax(target.forward(self._tree, layout, self._mask))
        self.roots.copy_(chosen)
        target.prefix_lens.add_((target.prefix_lens >= 0).int())
        return chosen

    def replay(self) -> Tensor:
        """A step, queued."""
        return self.step() if self._captured is None else self._captured.replay()

    def decode(self, prompts: Sequence[Tensor], new_tokens: int) -> PlainRun:
        """Decode as many prompts as there are places, ``new_tokens`` each, stop tokens included."""
        assert len(prompts) == self.target.max_batch
        texts = []
        for place, ids in enumerate(prompts):
            logits = self.target.begin(place, ids, ids.numel() + new_tokens)
            texts.append([int(logits.argmax())])
        self.roots.copy_(torch.tensor([text[0] for text in texts]))
        is_cuda = self.target.device.type == "cuda"
        rows = torch.empty((new_tokens - 1, len(prompts)), dtype=torch.int64, pin_memory=is_cuda)
        events: list[torch.cuda.Event] = []
        if is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for step in range(new_tokens):
            if step < new_tokens - 1:
                rows[step].copy_(self.replay(), non_blocking=True)
                if is_cuda:
                    events.append(torch.cuda.Event())
                    events[-1].record()
            if step:  # one behind
                if is_cuda:
                    events[step - 1].synchronize()
                for text, token in zip(texts, rows[step - 1].tolist(), strict=True):
                    text.append(token)
        seconds = time.perf_counter() - begin
        for place in range(len(prompts)):
            self.target.free(place)
        return PlainRun(texts, seconds, new_tokens - 1)

"""Generate text for many prompts at once: every row reads one token a step, at its own position.

A prompt's tokens go through the same steps as new ones (they are given instead of chosen), and a row
that is done takes the next prompt, all on the device. So a step has one shape for ever, is captured in one
CUDA graph, and the host only looks now and then how far things are.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ddtree.invariants.streams import beside, capturing
from ddtree.spec.errors import require
from train.llama import Llama

LOOK_EVERY = 32
"""Steps between two looks of the host."""


@dataclass(frozen=True)
class Texts:
    """Prompts with what followed, one a row."""

    token_ids: Int64[Tensor, "texts length"]
    """Zeros after a text's end."""
    prompt_lens: Int64[Tensor, " texts"]
    lengths: Int64[Tensor, " texts"]
    """Prompt included; the stop token too. Equal to the prompt's where a text was never begun."""
    temperatures: Float[Tensor, " texts"]

    @property
    def new_tokens(self) -> int:
        """Tokens that the target chose."""
        return int((self.lengths - self.prompt_lens).clamp_min(0).sum())


class Generator:
    """Rows of one shape that generate texts of at most ``length`` tokens."""

    def __init__(self, llama: Llama, *, rows: int, length: int, stop_ids: Sequence[int]) -> None:
        """Take the memory of ``rows`` texts; ``length`` counts the prompt too."""
        self.llama, self.rows, self.length = llama, rows, length
        self.stop_ids = torch.tensor(list(stop_ids), device=llama.device)
        self.caches = llama.caches(rows, length)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Tensor],
        temperatures: Sequence[float],
        *,
        seed: int,
        stops: Sequence[int] | None = None,
        new_tokens: int | None = None,
        deadline: float | None = None,
        on_look: Callable[[int, int], None] = lambda _done, _tokens: None,
    ) -> Texts:
        """Continue every prompt.

        Args:
            prompts: tokens ``[n]`` of each, at least one and fewer than ``length``.
            temperatures: of each; 0 is greedy.
            seed: repeats the texts on the same device, given the same prompts and rows.
            stops: stop tokens until a text is over, 1 where not given.
            new_tokens: most tokens after a prompt; None: as ``length`` allows.
            deadline: on ``time.monotonic()``'s clock; texts are left as they stand then.
            on_look: told now and then how many texts are done or begun, and how many tokens read.

        Raises:
            InputError: a prompt is empty or leaves no room.
        """
        lens = [p.numel() for p in prompts]
        bad = [n for n in lens if not 1 <= n < self.length]
        require(not bad, f"prompts of {bad[:3]} tokens; texts have room for {self.length}")
        state = _State(self, prompts, temperatures, stops, new_tokens)
        step = self._captured(state)
        torch.manual_seed(seed)  # after the capture, whose warming draws too
        steps = 0
        while True:
            for _ in range(LOOK_EVERY):
                step()
            steps += LOOK_EVERY
            begun = min(int(state.counter), len(prompts))  # waits for the device
            on_look(begun, steps * self.rows)
            is_late = deadline is not None and time.monotonic() > deadline
            if is_late or not bool((state.item < len(prompts)).any()):
                break
        return state.texts(len(prompts))

    def _captured(self, state: "_State") -> Callable[[], None]:
        """A step of the state, as a CUDA graph where there is a GPU."""
        if self.llama.device.type != "cuda":
            return state.step
        before = state.copy()
        with beside(self.llama.device):  # warms what is lazy
            for _ in range(2):
                state.step()
        with capturing() as graph:
            state.step()
        state.restore(before)
        return graph.replay


class _State:
    """What a step reads and writes, in place."""

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[Tensor],
        temperatures: Sequence[float],
        stops: Sequence[int] | None,
        new_tokens: int | None,
    ) -> None:
        self.generator, self.llama = generator, generator.llama
        device, rows, length = self.llama.device, generator.rows, generator.length
        count = len(prompts)
        # one prompt more, whose tokens are all given: rows without work read it over and over
        lens = torch.tensor([*(p.numel() for p in prompts), length], device=device)
        given = torch.zeros(count + 1, length, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            given[i, : prompt.numel()] = prompt
        self.token_ids = given.to(device)
        self.prompt_lens = lens
        self.limits = (lens + (new_tokens or length)).clamp_max(length)
        self.lengths = lens.clone()
        self.temperatures = torch.tensor([*temperatures, 0.0], device=device)
        self.stops = torch.tensor([*(stops or [1] * count), 1], device=device)
        self.item = torch.arange(rows, device=device).clamp_max(count)
        self.counter = torch.tensor(min(rows, count), device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.token = self.token_ids[self.item, 0]

    def step(self) -> None:
        """Read a token in every row, choose or take the next, move rows that are done on."""
        hidden = self.llama.step(self.token, self.position, self.generator.caches)
        logits = torch.nn.functional.linear(hidden, self.llama.head).float()
        chosen = draw(logits, self.temperatures[self.item])

        position = self.position + 1
        is_given = position < self.prompt_lens[self.item]
        token = torch.where(is_given, self.token_ids[self.item, position], chosen)
        self.token_ids[self.item, position] = token
        self.lengths[self.item] = torch.maximum(self.lengths[self.item], position + 1)

        stopped = (token[:, None] == self.generator.stop_ids).any(-1) & ~is_given
        self.stops[self.item] -= stopped.long()
        is_done = (position + 1 >= self.limits[self.item]) | (self.stops[self.item] <= 0)
        self._refill(is_done, token, position)

    def _refill(self, is_done: Bool[Tensor, " rows"], token: Tensor, position: Tensor) -> None:
        last = self.prompt_lens.shape[0] - 1
        following = (self.counter + is_done.long().cumsum(0) - 1).clamp_max(last)
        self.item.copy_(torch.where(is_done, following, self.item))
        self.counter += is_done.sum()
        self.position.copy_(torch.where(is_done, 0, position))
        self.token.copy_(torch.where(is_done, self.token_ids[self.item, 0], token))

    def copy(self) -> dict[str, Tensor]:
        """All tensors as they are now."""
        return {k: v.clone() for k, v in vars(self).items() if isinstance(v, Tensor)}

    def restore(self, values: dict[str, Tensor]) -> None:
        """Set all tensors, in place."""
        for name, value in values.items():
            getattr(self, name).copy_(value)

    def texts(self, count: int) -> Texts:
        """The texts so far, without the prompt for idle rows."""
        lengths = self.lengths[:count].cpu()
        token_ids = self.token_ids[:count].cpu()
        token_ids[torch.arange(token_ids.shape[1]) >= lengths[:, None]] = 0
        return Texts(
            token_ids,
            self.prompt_lens[:count].cpu(),
            lengths,
            self.temperatures[:count].cpu(),
        )


def draw(
    logits: Float[Tensor, "rows vocab"], temperatures: Float[Tensor, " rows"]
) -> Int64[Tensor, " rows"]:
    """A token of each row from ``softmax(logits / temperature)``, by Gumbel noise; 0: the largest."""
    # minus the logarithm of an exponential draw, kept finite: 0 times infinity is no choice
    noise = torch.empty_like(logits).exponential_().clamp_min_(1e-30).log_()
    return logits.addcmul(noise, -temperatures[:, None]).argmax(-1)

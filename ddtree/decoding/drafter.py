"""What a drafter is: a guess at the next ``horizon`` tokens, one distribution a depth."""

from typing import Protocol

from jaxtyping import Float, Float32, Int64
from torch import Tensor

from ddtree.spec.contracts import BlockSize


class Drafter(Protocol):
    """Drafts one request, round after round.

    In a batch each place drafts with a shallow copy: what belongs to a request must lie in attributes
    that ``reset`` and ``draft`` replace, not in objects that they change.
    """

    @property
    def block_size(self) -> BlockSize:
        """Tokens of one pass, root included; the horizon is one less."""
        ...

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose output hidden states the drafter reads; empty: it reads none."""
        ...

    def reset(self) -> None:
        """Forget the request: the next call to ``draft`` begins a new one."""
        ...

    def draft(
        self,
        token_ids: Int64[Tensor, " length"],
        features: Float[Tensor, "new width"] | None,
    ) -> Float32[Tensor, "1 horizon vocab"]:
        """Log-probs of the tokens at depths 1 to ``horizon`` after the root.

        Args:
            token_ids: every token so far, the root last, on the CPU.
            features: the hidden states of ``target_layer_ids``, side by side, of the entries
                committed since the last call (the root is not committed); None where there are
                no such layers.

        Returns:
            Normalised float32 log-probs; -inf where the drafter knows nothing.
        """
        ...

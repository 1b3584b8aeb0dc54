"""Other implementations of tree verification behind our public functions, each from its own package.

``ddtree conform`` and ``ddtree isolate`` know them by name. None is copied here: a peer that is not installed
is told with what installs it.
"""

from importlib import import_module
from typing import Any, NamedTuple


class Peer(NamedTuple):
    """Where a backend is found, and what it is."""

    target: str
    """``module:attribute`` of an object, or of a class without arguments."""
    what: str
    needs: str = ""
    """What to install, as a command; empty: what ddtree needs anyway."""
    packages: tuple[str, ...] = ()
    """Whose versions belong to a result."""
    cuda: bool = False
    """It needs a GPU."""


_SGLANG = "pip install --no-deps sglang==0.5.23"
PEERS: dict[str, Peer] = {
    "reference": Peer("ddtree.peers.own:Reference", "ddtree.spec, the reference itself", "", ("torch",)),
    "impl": Peer(
        "ddtree.peers.own:Impl", "ddtree.impl, the round in Triton",
        "pip install 'ddtree[kernels]'", ("torch", "triton"),
    ),
    "sdpa": Peer(
        "ddtree.peers.pytorch:Sdpa", "scaled_dot_product_attention with a dense additive mask", "", ("torch",)
    ),
    "flex": Peer("ddtree.peers.pytorch:Flex", "flex_attention with a block mask", "", ("torch",)),
    "transformers-sdpa": Peer(
        "ddtree.peers.hf:Sdpa", "Transformers' sdpa attention function with a 4-D mask",
        "pip install 'ddtree[models]'", ("transformers", "torch"),
    ),
    "transformers-eager": Peer(
        "ddtree.peers.hf:Eager", "Transformers' eager attention function with a 4-D mask",
        "pip install 'ddtree[models]'", ("transformers", "torch"),
    ),
    "sglang-triton": Peer(
        "ddtree.peers.sglang:Triton",
        "SGLang's Triton kernels: extend_attention_fwd, tree builder, greedy verify",
        _SGLANG, ("sglang", "triton", "torch"),
    ),
    "flashinfer": Peer(
        "ddtree.peers.flashinfer:Paged", "FlashInfer's paged prefill with a packed custom mask",
        "pip install --no-deps -r bench/requirements.txt", ("flashinfer-python", "torch"), cuda=True,
    ),
}  # fmt: skip
"""By the names of the command line."""


def load(target: str) -> Any:
    """The object that ``module:attribute`` names, a class made into one of its objects.

    Raises:
        ImportError: no such module, or one that it needs is not installed.
        AttributeError: the module has no such attribute.
    """
    module, _, attribute = target.partition(":")
    found = attribute_of(import_module(module), attribute)
    return found() if isinstance(found, type) else found


def attribute_of(module: Any, attribute: str) -> Any:
    """What a module bears under a name or a dotted path; the module itself without one.

    Raises:
        AttributeError: the module has no such attribute.
    """
    found = module
    for part in filter(None, attribute.split(".")):
        found = getattr(found, part)
    return found


__all__ = ["PEERS", "Peer", "load"]

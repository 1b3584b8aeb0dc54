"""Real targets and drafters, and the loop that decodes with them."""

from ddtree.decoding.decoding import (
    TIE_TOLERANCE,
    Choices,
    Comparison,
    Generation,
    RoundStats,
    compare,
)
from ddtree.decoding.dflash import DFlashDrafter
from ddtree.decoding.drafter import Drafter
from ddtree.decoding.embedded import load_target
from ddtree.decoding.founding_bug import FoundingBug
from ddtree.decoding.generate import DecodingTarget, autoregressive, generate, stop_ids_of
from ddtree.decoding.ngram import NGramDrafter
from ddtree.decoding.target import HFTarget

__all__ = [
    "TIE_TOLERANCE",
    "Choices",
    "Comparison",
    "DFlashDrafter",
    "DecodingTarget",
    "Drafter",
    "FoundingBug",
    "Generation",
    "HFTarget",
    "NGramDrafter",
    "RoundStats",
    "autoregressive",
    "compare",
    "generate",
    "load_target",
    "stop_ids_of",
]

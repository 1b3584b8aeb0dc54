"""Real targets and drafters, and the loop that decodes with them."""

from ddtree.decoding.batch import BatchTarget, DecodingTarget, SeparateTargets
from ddtree.decoding.completion import Completion, Piece
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
from ddtree.decoding.generate import autoregressive, generate, stop_ids_of
from ddtree.decoding.loop import decode
from ddtree.decoding.ngram import NGramDrafter
from ddtree.decoding.rounds import Request
from ddtree.decoding.stops import Stops, TextStream
from ddtree.decoding.target import HFTarget

__all__ = [
    "TIE_TOLERANCE",
    "BatchTarget",
    "Choices",
    "Comparison",
    "Completion",
    "DFlashDrafter",
    "DecodingTarget",
    "Drafter",
    "FoundingBug",
    "Generation",
    "HFTarget",
    "NGramDrafter",
    "Piece",
    "Request",
    "RoundStats",
    "SeparateTargets",
    "Stops",
    "TextStream",
    "autoregressive",
    "compare",
    "decode",
    "generate",
    "load_target",
    "stop_ids_of",
]

"""What a tuning run found, and where it is kept: one JSON file a pair, device, dtype and batch size."""

import hashlib
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ddtree.decoding.embedded import EMBEDDED_DRAFTER, cache_home, embedded_gguf, folder_of
from ddtree.invariants.files import PlaceError, written_whole
from ddtree.spec.errors import InputError

FORMAT = 1  # raise when what a file holds changes
NEAR = 0.02
"""Rates that differ by less are taken as equal: then the smaller budget is the better one."""
SPREAD = 1.5
"""Quartiles of one cost that lie further apart, upper over lower, are not the machine's own."""
FALL = 0.8
"""More rows never cost less than this share of what fewer do."""


@dataclass(frozen=True)
class Key:
    """What a result holds for."""

    target: str
    drafter: str
    device: str
    dtype: str
    attention: str
    batch_size: int

    def __str__(self) -> str:
        """In words."""
        batch = f"batch size {self.batch_size}"
        return (
            f"{_short(self.target)} with {_short(self.drafter)} on {self.device}, {self.dtype}, "
            f"{self.attention} attention, {batch}"
        )


@dataclass(frozen=True)
class Times:
    """Milliseconds: the median of several, and the quartiles beside it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        """Of measured seconds."""
        ordered = sorted(1e3 * each for each in seconds)

        def at(share: float) -> float:
            return ordered[round(share * (len(ordered) - 1))]

        return cls(at(0.5), at(0.25), at(0.75))


@dataclass(frozen=True)
class Cost:
    """What a round of a budget costs."""

    budget: int
    rounds: int
    """Timed."""
    draft_ms: Times | None
    """Of the whole batch, as ``verify_ms``. None: the device drafts and verifies in one, and ``verify_ms``
    has both."""
    verify_ms: Times
    """Tree, layout, mask, the target's pass over ``q_len`` rows, acceptance and commit."""

    @property
    def q_len(self) -> int:
        """Query rows of each request."""
        return self.budget + 1

    @property
    def round_ms(self) -> float:
        """The whole round."""
        return (self.draft_ms.median if self.draft_ms else 0.0) + self.verify_ms.median


@dataclass(frozen=True)
class Accepted:
    """What trees of a budget and topk yield."""

    budget: int
    topk: int | None
    rounds: int
    tokens_per_round: float
    lowest: float
    """Of the prompt with the fewest tokens a round."""
    highest: float
    by_depth: tuple[float, ...]
    """The share of rounds that accept at least 1, 2, 3, ... drafted tokens."""


@dataclass(frozen=True)
class Plain:
    """Decoding one token a pass, the faster of two ways."""

    ms: Times
    """Of a pass."""
    tokens_per_second: float
    how: str


@dataclass(frozen=True)
class Rate:
    """Tokens a second of all requests together, the prompt's pass not counted."""

    budget: int
    """0: plain decoding."""
    topk: int | None
    tokens_per_second: float
    lowest: float
    """With the acceptance of the prompt that accepts least."""
    highest: float


@dataclass(frozen=True)
class Tuning:
    """All that a run measured."""

    key: Key
    made: str
    """When, in ISO 8601."""
    versions: dict[str, str]
    prompts: int
    prefix_lens: tuple[int, int]
    """Shortest and longest prefix of the texts' places."""
    new_tokens: int
    temperature: float
    horizon: int
    plain: Plain
    costs: tuple[Cost, ...]
    accepted: tuple[Accepted, ...]

    def cost(self, budget: int) -> Cost:
        """Of a measured budget."""
        return next(cost for cost in self.costs if cost.budget == budget)

    @property
    def noise(self) -> str:
        """Why the costs are not to be trusted, with the numbers; empty where they are."""
        timed = {f"q_len {cost.q_len}": cost.verify_ms for cost in self.costs}
        for what, ms in {"plain decoding": self.plain.ms, **timed}.items():
            if ms.high > SPREAD * ms.low:
                return _busy(f"{what} took {ms.low:.1f} to {ms.high:.1f} ms (quartiles)")
        for fewer, more in pairwise(sorted(self.costs, key=lambda cost: cost.q_len)):
            if more.verify_ms.median < FALL * fewer.verify_ms.median:
                return _busy(
                    f"q_len {more.q_len} took {more.verify_ms.median:.1f} ms, less than q_len "
                    f"{fewer.q_len} with {fewer.verify_ms.median:.1f} ms"
                )
        return ""

    @property
    def doubt(self) -> str:
        """Why the recommended tree may be no faster than plain decoding, with the numbers; or nothing."""
        tree, plain = self.best_tree, self.plain
        if not self.best.budget:
            return ""
        quick = plain.tokens_per_second * plain.ms.median / plain.ms.low
        if tree.tokens_per_second <= quick:
            return (
                "that lies within the spread of plain decoding, whose quicker passes (quartile) give "
                f"{quick:.3g} tokens/s"
            )
        if tree.lowest < plain.tokens_per_second:
            return (
                "plain decoding lies within the spread of the prompts: with the one that accepts least it "
                "is faster"
            )
        return ""

    def even_at(self, budget: int) -> float:
        """Tokens a round at which the budget's trees are as fast as plain decoding."""
        each = self.plain.tokens_per_second / self.key.batch_size
        return each * self.cost(budget).round_ms / 1e3

    @property
    def rates(self) -> tuple[Rate, ...]:
        """What each measured tree is expected to give."""
        batch = self.key.batch_size
        rates = []
        for it in self.accepted:
            rounds = 1e3 * batch / self.cost(it.budget).round_ms
            parts = (it.tokens_per_round, it.lowest, it.highest)
            rates.append(Rate(it.budget, it.topk, *(rounds * tokens for tokens in parts)))
        return tuple(rates)

    @property
    def best_tree(self) -> Rate:
        """The fastest tree; of nearly equal ones that of the smallest budget, then of most candidates."""
        fastest = max(rate.tokens_per_second for rate in self.rates)
        near = [rate for rate in self.rates if rate.tokens_per_second >= (1 - NEAR) * fastest]
        return min(near, key=lambda rate: (rate.budget, -(rate.topk or math.inf)))

    @property
    def best(self) -> Rate:
        """What is recommended: the fastest tree, or plain decoding (budget 0) where that is faster."""
        tree, plain = self.best_tree, self.plain.tokens_per_second
        return tree if tree.tokens_per_second > plain else Rate(0, None, plain, plain, plain)

    @property
    def gain(self) -> float:
        """The fastest tree's rate over plain decoding's."""
        return self.best_tree.tokens_per_second / self.plain.tokens_per_second

    def __str__(self) -> str:
        """The recommendation in a sentence."""
        tree, plain = self.best_tree, f"{self.plain.tokens_per_second:.3g} tokens/s"
        name = f"budget {tree.budget}, topk {tree.topk or 'all'}"
        rate = f"{tree.tokens_per_second:.3g} tokens/s ({tree.lowest:.3g} to {tree.highest:.3g} by prompt)"
        if self.best.budget:
            doubt = f"; {self.doubt}" if self.doubt else ""
            return f"{name}: {rate} expected, {self.gain:.2f} times plain decoding ({plain}){doubt}"
        return (
            f"plain decoding is faster here: {plain}; the best tree ({name}) would give {rate}, "
            f"{self.gain:.2f} times as much"
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, with what follows from it."""
        return {
            "format": FORMAT,
            **asdict(self),
            "rates": [asdict(rate) for rate in self.rates],
            "best": asdict(self.best),
            "best_tree": asdict(self.best_tree),
            "gain": self.gain,
            "noise": self.noise or None,
            "doubt": self.doubt or None,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Tuning":
        """What ``as_json`` gave.

        Raises:
            KeyError, TypeError: it is no such thing.
        """
        return cls(
            key=Key(**found["key"]),
            plain=Plain(**{**found["plain"], "ms": Times(**found["plain"]["ms"])}),
            costs=tuple(
                Cost(**{
                    **cost,
                    "draft_ms": Times(**cost["draft_ms"]) if cost["draft_ms"] else None,
                    "verify_ms": Times(**cost["verify_ms"]),
                })
                for cost in found["costs"]
            ),
            accepted=tuple(
                Accepted(**{**each, "by_depth": tuple(each["by_depth"])})
                for each in found["accepted"]
            ),
            prefix_lens=(int(found["prefix_lens"][0]), int(found["prefix_lens"][1])),
            **{
                name: found[name]
                for name in ("made", "versions", "prompts", "new_tokens", "temperature", "horizon")
            },
        )  # fmt: skip


def store(tuning: Tuning) -> Path:
    """Write the result over an older one of the same key; whole or not at all.

    Raises:
        InputError: the cache folder cannot be written.
    """
    folder = cache_home() / "tuning"
    name = hashlib.sha256(json.dumps(asdict(tuning.key)).encode()).hexdigest()[:16]
    path = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as work:
            work.write_text(json.dumps(tuning.as_json(), indent=1), encoding="utf-8")
    except OSError as error:
        raise PlaceError(
            f"cannot write {path}: {error}; set XDG_CACHE_HOME to another place", error
        ) from error
    return path


def stored() -> list[Tuning]:
    """Every result that is kept; files of another format or none are passed over."""
    found = []
    for path in sorted((cache_home() / "tuning").glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] == FORMAT:
                found.append(Tuning.from_json(content))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def find(key: Key) -> Tuning | None:
    """The result for the key; if there is none for its batch size, that of the nearest one."""
    near = [
        tuning
        for tuning in stored()
        if asdict(tuning.key) | {"batch_size": 0} == asdict(key) | {"batch_size": 0}
    ]
    if not near:
        return None
    return min(near, key=lambda it: abs(math.log(it.key.batch_size / key.batch_size)))


def require_tuning(key: Key, command: str) -> Tuning:
    """``find``, or an error that says how to make the result.

    Args:
        key: what it must hold for.
        command: that measures it.

    Raises:
        InputError: there is none.
    """
    tuning = find(key)
    if tuning is None:
        raise InputError(f"{absent(key)}; run once, about a minute: {command}")
    return tuning


def absent(key: Key) -> str:
    """What to say where ``find`` found nothing, with the results of the same target."""
    others = [str(it.key) for it in stored() if it.key.target == key.target]
    there = f" (there are some for {'; '.join(others)})" if others else ""
    return f"budget 'auto' needs measurements, and none are stored for {key}{there}"


def key_of(
    model: Any, drafter: str | Path, attention: str, batch_size: int, block_size: int
) -> Key:
    """What a result for these holds for; ``block_size`` is the n-gram drafter's."""
    weight: torch.Tensor = model.get_input_embeddings().weight
    return Key(
        target=target_name(model),
        drafter=drafter_name(drafter, block_size),
        device=device_name(weight.device),
        dtype=str(weight.dtype).removeprefix("torch."),
        attention=attention,
        batch_size=batch_size,
    )


def key_of_names(
    target: str,
    drafter: str,
    device: str,
    dtype: str,
    attention: str,
    batch_size: int,
    block_size: int,
) -> Key | None:
    """``key_of`` without the model; None where its name is not known before it is loaded.

    Args:
        target: as ``load_target`` takes it.
        drafter: a name, or a checkpoint's folder.
        device: torch's name of it.
        dtype: torch's name of the weights' dtype.
        attention: ``"dense"`` or ``"paged"``.
        batch_size: requests that are decoded at once.
        block_size: the n-gram drafter's.
    """
    path = folder_of(embedded_gguf()) if target == "embedded" else Path(target).expanduser()
    if path.is_file():
        return None
    return Key(
        target=str(path.resolve()) if path.exists() else target,
        drafter=drafter_name(drafter, block_size),
        device=device_name(torch.device(device)),
        dtype=dtype,
        attention=attention,
        batch_size=batch_size,
    )


def target_name(model: Any) -> str:
    """What a model was loaded from, or else a name made of its configuration."""
    name = str(getattr(model, "name_or_path", "") or "")
    if name:
        return str(Path(name).resolve()) if Path(name).exists() else name
    config = model.config.to_json_string(use_diff=False)
    return f"{type(model).__name__} {hashlib.sha256(config.encode()).hexdigest()[:12]}"


def drafter_name(drafter: str | Path, block_size: int) -> str:
    """A drafter that is given by name: the n-gram drafter with its block size, or a checkpoint.

    Of a folder the weights' sizes and dates count too: one trained anew is another drafter.
    """
    if drafter == "ngram":
        return f"ngram, block size {block_size}"
    folder = EMBEDDED_DRAFTER if drafter == "embedded" else Path(drafter).resolve()
    if not folder.exists():
        return str(drafter)
    files = [(it.name, it.stat()) for it in sorted(folder.glob("*.safetensors"))]
    weights = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files])
    return f"{folder} ({hashlib.sha256(weights.encode()).hexdigest()[:8]})"


def device_name(device: torch.device) -> str:
    """The device's kind; of a CPU the threads too, since they decide what a pass costs."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' * (threads > 1)}"


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _busy(why: str) -> str:
    return f"this machine was busy while measuring; measure again: {why}"


def _short(name: str) -> str:
    return Path(name).name if Path(name).is_absolute() else name

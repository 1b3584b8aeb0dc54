"""Run a backend's attention on one case: eager, in fixed buffers, or replayed in them.

``replay`` fills the buffers with an earlier call of another size, captures (on a CUDA device a real graph),
fills them with the call in place, and runs what was captured.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ddtree.invariants.conformance.backend import Backend, Refused
from ddtree.invariants.conformance.failure import WrongResult
from ddtree.invariants.shadow import copied
from ddtree.invariants.strategies import VerifyCall
from ddtree.invariants.streams import beside, capturing
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import FlatMask, QLen, TreeMask
from ddtree.spec.errors import of_kind
from ddtree.spec.mask import Form, convert_mask, tree_mask

Execution = Literal["eager", "buffers", "replay"]
POISON = 512.0
"""What unwritten memory holds: finite, so that a masked read does no harm, and larger than what is right."""
SPARE = 2
"""By how much fixed buffers are larger than the call, in requests, rows and entries."""


class Inputs(NamedTuple):
    """The tensors of one layer."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_pool: Tensor
    value_pool: Tensor


@dataclass(frozen=True)
class AttentionCase:
    """One verify pass of one layer, and how it is run."""

    call: VerifyCall
    execution: Execution = "eager"
    earlier: VerifyCall | None = None
    """What the buffers held when the replayed work was captured; for ``replay`` alone."""
    form: Form = "flat"
    dtype: torch.dtype = torch.float32
    q_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    """Keywords of ``verify_attention``."""
    seed: int = 0
    is_open: bool = False
    """Every row sees every entry of its request: a mask that a caller may pass, and no tree's."""

    def flat(self, call: VerifyCall) -> FlatMask:
        """The flat mask of one of its calls."""
        if not self.is_open:
            return tree_mask(call.tree, call.layout, "flat")
        return FlatMask(torch.ones(int(call.layout.mask_indptr[-1]), dtype=torch.bool))

    def mask(self, call: VerifyCall, form: Form) -> TreeMask:
        """The same in any form."""
        return convert_mask(self.flat(call), call.layout, form)

    def __str__(self) -> str:
        """``2 requests, q_len 3, 2 nodes of it, prefix_len 0 and 5, page size 4, replay``."""
        call, layout = self.call, self.call.layout
        parts = [
            f"{len(call.prefix_lens)} request{'s' * (len(call.prefix_lens) > 1)}",
            f"q_len {_listed(layout.qo_indptr.diff().tolist())}",
            f"num_nodes {_listed(call.tree.num_nodes.tolist())}",
            f"prefix_len {_listed(call.prefix_lens.tolist())}",
            f"page size {call.slots.page_size}",
        ]
        if self.execution != "eager":
            parts.append({"buffers": "fixed buffers", "replay": "replay"}[self.execution])
        if self.earlier is not None:
            widths = self.earlier.layout.qo_indptr.diff().tolist()
            parts.append(f"after a call of q_len {_listed(widths)}")
        if self.is_open:
            parts.append("every entry visible")
        parts += [f"{name} {_plain(value)}" for name, value in self.options.items()]
        return ", ".join(parts)


def attend(backend: Backend, case: AttentionCase, make: Callable[[VerifyCall, int], Inputs]) -> Any:
    """What the backend returns for the case's call.

    Args:
        backend: offers ``verify_attention``.
        case: the call and how it is run.
        make: the tensors of a call, given the number of slots of the pool.

    Returns:
        The output, its first rows those of the call; or whatever tuple the backend returns.

    Raises:
        WrongResult: it wrote into what it was given.
    """
    function, device = backend.functions["verify_attention"], backend.device
    options = copied(case.options, device)
    if backend.accepts("verify_attention", "page_size"):
        options["page_size"] = case.call.slots.page_size
    calls = [call for call in (case.earlier, case.call) if call is not None]
    slots = max(call.slots.num_slots for call in calls)
    if case.execution == "eager":
        given = (*make(case.call, slots), case.call.layout, case.mask(case.call, case.form))
        arguments = copied(given, device)
        return _undisturbed(_named(arguments, options), lambda: function(*arguments, **options))

    buffers = VerifyBuffers(
        max(len(call.prefix_lens) for call in calls) + 1,
        QLen(max(call.layout.max_q_len for call in calls) + SPARE),
        max(int(call.prefix_lens.max()) for call in calls) + SPARE,
        device=device,
    )
    rows = buffers.max_batch * buffers.max_q_len
    static = Inputs(
        *(
            part.new_full((rows if i < 3 else slots, *part.shape[1:]), POISON, device=device)
            for i, part in enumerate(make(case.call, slots))
        )
    )

    def write(call: VerifyCall) -> None:
        buffers.fill(*copied((call.tree, call.layout, case.flat(call)), device))
        for into, part in zip(static, make(call, slots), strict=True):
            into.fill_(POISON)
            into[: part.shape[0]] = part.to(device)

    write(calls[0])
    arguments = (*static, buffers.layout, buffers.mask)
    named = _named(arguments, options)
    if case.execution == "buffers":
        return _undisturbed(named, lambda: function(*arguments, **options))
    run = (backend.capture or _capture(function, device))(*arguments, **options)
    run()
    write(case.call)
    return _undisturbed(named, run)


def output_of(result: Any, rows: int) -> Tensor:
    """The output's rows that belong to the call, on the CPU.

    Raises:
        WrongResult: the result is neither a tensor nor a tuple that begins with one, or has fewer rows than
            the call.
    """
    output = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(output, Tensor):
        within = "a tuple that begins with " if output is not result else ""
        raise WrongResult(
            f"verify_attention returned {within}{of_kind(output)}, expected (output, lse)"
        )
    if output.ndim != 3 or output.shape[0] < rows:
        shape = list(output.shape)
        raise WrongResult(f"the output has shape {shape}; expected [{rows}, q_heads, head_dim]")
    return output[:rows].detach().cpu()


def _capture(function: Callable[..., Any], device: str) -> Callable[..., Callable[[], Any]]:
    """Capture a call as a CUDA graph; without a CUDA device, a replay is the same call again."""
    if not device.startswith("cuda"):
        return lambda *args, **options: lambda: function(*args, **options)

    def capture(*args: Any, **options: Any) -> Callable[[], Any]:
        with beside(torch.device(device)):
            function(*args, **options)  # compiles and allocates outside the graph
        try:
            with capturing() as graph:
                result = function(*args, **options)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise Refused(f"it cannot be captured in a CUDA graph: {first}") from None

        def run() -> Any:
            graph.replay()
            torch.cuda.synchronize()
            return result

        return run

    return capture


def _undisturbed(given: dict[str, Tensor], run: Callable[[], Any]) -> Any:
    """What ``run`` returns; a verify pass reads, and whoever called it still needs what it read.

    Raises:
        WrongResult: it wrote into a tensor that it was given.
    """
    before = copied(tuple(given.values()))
    result = run()
    for (name, now), was in zip(given.items(), before, strict=True):
        if changed := int((now.cpu() != was).sum()):
            raise WrongResult(
                f"it wrote into its input {name}: {changed} of {was.numel()} numbers differ after the call"
            )
    return result


def _named(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call by name: ``key_pool``, ``layout.kv_indices``, ``mask.allowed``, ``sinks``."""
    *tensors, layout, mask = arguments
    named = dict(zip(Inputs._fields, tensors, strict=True)) | options
    for called, thing in (("layout", layout), ("mask", mask)):
        named |= {f"{called}.{f.name}": getattr(thing, f.name) for f in fields(thing)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _listed(values: list[int]) -> str:
    return " and ".join(map(str, values)) if len(set(values)) > 1 else str(values[0])


def _plain(value: Any) -> Any:
    return f"of {value.numel()} numbers" if isinstance(value, Tensor) else value

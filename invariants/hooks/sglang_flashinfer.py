"""SGLang's FlashInfer backend: what each verify pass plans its wrapper with, eager, captured and replayed.

FlashInfer's kernels take no metadata of their own: a pass is planned by ``begin_forward`` of a wrapper, which
is given both indptrs, the slots and the mask. All verify passes are planned through one method of SGLang's,
and there the wrapper's ``begin_forward`` is watched for as long as it runs.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ddtree.invariants.hooks import sglang_calls as calls
from ddtree.invariants.hooks.watch import Watch, is_capturing, signature, wait_for


@dataclass(frozen=True)
class Pass:
    """The pass whose metadata is being made."""

    backend: Any
    batch: Any
    where: str
    kind: str
    """Names what made the call, in counters and files' names."""
    is_graph: bool = False
    is_capture: bool = False
    """Its mask and slots are not filled then."""


class FlashInfer:
    """The hooks of one process on ``FlashInferAttnBackend``."""

    def __init__(self, watch: Watch) -> None:
        """Hold what is planned to the table, as the watch does."""
        self.watch = watch
        self._pass: Pass | None = None

    def eager(self, original: Callable[..., Any], backend: Any, batch: Any, *more: Any) -> Any:
        """Around ``init_forward_metadata``: which pass the wrapper is planned for."""
        made = Pass(backend, batch, "FlashInfer's verify plan", "sglang_flashinfer")
        return self._during(made, lambda: original(backend, batch, *more))

    def graph(
        self,
        original: Callable[..., Any],
        backend: Any,
        batch: Any,
        in_capture: bool = False,
        **more: Any,
    ) -> Any:
        """Around ``init_forward_metadata_out_graph``: the same of a capture, and before each replay."""
        what = "capture" if in_capture else "replay"
        made = Pass(
            backend, batch, f"FlashInfer's verify plan of a {what}", f"sglang_flashinfer_{what}",
            is_graph=True, is_capture=in_capture,
        )  # fmt: skip
        return self._during(made, lambda: original(backend, batch, in_capture, **more))

    def _during(self, made: Pass, work: Callable[[], Any]) -> Any:
        before, self._pass = self._pass, made
        try:
            return work()
        finally:
            self._pass = before

    def plan(
        self, original: Callable[..., Any], updater: Any, ragged: Any, paged: Any, *args: Any, **named: Any
    ) -> Any:  # fmt: skip
        """Around ``call_begin_forward``: look at what the paged wrapper is planned with."""
        made, work = self._pass, functools.partial(original, updater, ragged, paged, *args, **named)
        if made is None or not calls.is_verify(made.batch.forward_mode):
            return work()
        with ExitStack() as stack:
            with self.watch.guarded(made.where):
                given = signature(original).bind(updater, ragged, paged, *args, **named).arguments
                if given["paged_kernel_lens"] is given["seq_lens"]:
                    stack.enter_context(self._watching(paged, made))
                # else cut to a window, which its mask is not: the wrapper of full layers tells more
            return work()

    @contextmanager
    def _watching(self, wrapper: Any, made: Pass) -> Iterator[None]:
        """Look at what the wrapper's ``begin_forward`` is given, meanwhile."""
        begin, own = wrapper.begin_forward, vars(wrapper).get("begin_forward")

        @functools.wraps(begin)
        def watched(*args: Any, **named: Any) -> Any:
            with self.watch.guarded(made.where):
                self._hold(made, args, named)
            return begin(*args, **named)

        if hasattr(begin, "func"):
            watched.func = begin.func  # type: ignore[attr-defined]  # SGLang tells its fast plan by it
        wrapper.begin_forward = watched
        try:
            yield
        finally:
            if own is None:
                del wrapper.begin_forward
            else:
                wrapper.begin_forward = own

    def _hold(self, made: Pass, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if is_capturing():
            self.watch.once(f"not checked: {made.where}: it is itself prepared in a CUDA graph")
            return
        if not made.is_capture and not self.watch.is_due(made.kind):
            return
        wait_for(made.batch.seq_lens)
        qo_indptr, kv_indptr, kv_indices, *_ = args
        call = calls.planned_call(
            made.backend, made.batch, qo_indptr, kv_indptr, kv_indices, named.get("custom_mask"),
            max_q_len=named.get("max_q_len"), is_graph=made.is_graph, is_filled=not made.is_capture,
        )  # fmt: skip
        if call is not None:
            self.watch.hold(call, made.kind, made.where)

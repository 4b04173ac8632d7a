"""``capture``: a module whose F, I and W are replayed as CUDA graphs, and run as they are where that cannot be."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from sternway._torch import require
from sternway._torch.captures import is_preparing
from sternway._torch.cuda_graphs import all_modules, held_tensors, hooked_module
from sternway._torch.saved_hooks import top_saved_hooks
from sternway._tree import leaves, put_tensors
from sternway.errors import SplitError
from sternway.split._unseen import UNSEEN
from sternway.split.captured._call import CapturedCall, Lease
from sternway.split.captured._form import CallForm
from sternway.split.captured._grads import GradBuffers
from sternway.split.captured._graphs import GraphSet
from sternway.split.captured._look import Uncapturable
from sternway.split.captured._sets import CapturedForm

_NEEDS_GRAD = attrgetter("requires_grad")


def capture(module: nn.Module, sample: Any, *, in_flight: int = 1, forms: int = 4) -> Captured:
    """Capture the forward of a module and both halves of its backward as CUDA graphs.

    A replay costs the CPU next to nothing: below some size, a module is as fast as its kernels, not as Python. The
    result is called as the module is, and its gradients are those of the module: by ``backward_input`` and
    ``Pending.run()``, or by ``backward()``.

    Example:
        >>> stage = split.capture(block, x, in_flight=3)                       # doctest: +SKIP
        >>> grad, pending = split.backward_input(stage(x), arriving, x)        # doctest: +SKIP
        >>> pending.run()                                                      # doctest: +SKIP

    What Python does in the forward happens at the capture and not again. Where it makes a difference, the module runs
    as it is, with a warning that says why; so it does without gradients, and while a module in it has hooks. Hooks of
    parameters and functions of ``BackwardState.on_grad`` run as ever.

    Args:
        module: on a CUDA device, with its inputs.
        sample: one microbatch: a tensor, a tuple of arguments, or a dict of keyword arguments. Its tensors must require
            gradients where those of later calls do. It is captured in the modes of this moment: training, autocast.
        in_flight: how many microbatches may be between F and the end of W. Each has graphs and memory of its own.
        forms: how many forms of call (shapes, modes) are captured. A call of another form runs as it is.

    Raises:
        SplitError: if the module or the sample is not on a CUDA device.
    """
    args, kwargs = (
        ((), dict(sample)) if isinstance(sample, dict) else (sample if type(sample) is tuple else (sample,), {})
    )
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    places = sorted({str(tensor.device) for tensor in (*tensors, *module.parameters(), *module.buffers())})
    if not tensors or any(not place.startswith("cuda") for place in places):
        raise SplitError(
            "a module that is captured must be on a CUDA device, with its sample",
            got=f"tensors on {', '.join(places) or 'no device'}, {len(tensors)} of them in the sample",
            fix='call module.to("cuda"), and pass tensors that are there; on a CPU there are no CUDA graphs',
        )
    captured = Captured(module, in_flight=in_flight, forms=forms)
    with torch.enable_grad():
        captured.prepare(*args, **kwargs)
    return captured


class Captured(nn.Module):
    """A module whose F, I and W are CUDA graphs; ``capture`` makes one.

    Attributes:
        module: what was captured.
        in_flight: how many microbatches may be between F and the end of W.
        refusals: why calls ran as they are, each reason once.
    """

    def __init__(self, module: nn.Module, *, in_flight: int, forms: int = 4, grows: bool = False) -> None:
        super().__init__()
        require("split.capture")
        for name, value in (("in_flight", in_flight), ("forms", forms)):
            SplitError.unless(
                type(value) is int and value >= 1, f"{name} must be a number from 1 on", value, "pass one"
            )
        self.module, self.in_flight, self._limit, self._grows = module, in_flight, forms, grows
        self.refusals: list[str] = []
        self._without_hooks: object = None  # since when there are none: UNSEEN.since
        self._state: list[Any] = []  # where the parameters are, and which modules there are
        self._forget()

    def _forget(self) -> None:
        """Drop all graphs."""
        if self.__dict__.get("_captured") and _uses_cuda():
            torch.cuda.synchronize()  # they may be running
        self._grads = GradBuffers()
        self._captured: list[CapturedForm] = []
        self._refused: list[CallForm] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the module captures its own graphs."""
        return {
            **self.__dict__,
            "_grads": GradBuffers(),
            "_captured": [],
            "_refused": [],
            "_state": [],
            "_without_hooks": None,
        }

    @property
    def sets(self) -> int:
        """How many sets of graphs are captured now."""
        return sum(len(each.sets) for each in self._captured)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture this form of call, if it is not captured yet. Nothing is computed."""
        if (found := self._find(args, kwargs)) is not None:
            self._try(found[0], lambda: found[0].capture(self.in_flight))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: as graphs, if that can be."""
        if (
            not torch.is_grad_enabled()
            or is_preparing()
            or torch.compiler.is_compiling()
            or (_uses_cuda() and torch.cuda.is_current_stream_capturing())
        ):
            return self.module(*args, **kwargs)
        found = self._find(args, kwargs)
        lease = None if found is None else self._lease(found[0])
        if found is None or lease is None:
            return self.module(*args, **kwargs)
        captured, tensors = found
        graphs = lease.graphs
        needing = [tensors[index] for index in graphs.wanted]
        outputs = CapturedCall.apply(lease, tensors, *needing, *captured.trained)  # type: ignore[no-untyped-call]
        return put_tensors(graphs.tree, outputs)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CapturedForm, list[Tensor]] | None:
        """The graphs for a call, and its tensors; None if it runs as it is."""
        own = all_modules(self.module)
        held, modules = held_tensors(own), [*own, *getattr(self.module, "runs_inside", ())]
        if (reason := self._not_now(modules)) is not None:
            self._refuse(reason)
            return None
        state = [*map(id, own), *map(id, held), *map(Tensor.data_ptr, held), *map(_NEEDS_GRAD, held)]
        if state != self._state:  # of the first call, or parameters have moved
            self._state = state
            self._forget()
        form, tensors = CallForm.of(args, kwargs, modules)
        if any(captured.attributes.were_replaced() for captured in self._captured):
            self._forget()
        for captured in self._captured:
            if form.is_same(captured.form):
                return captured, tensors
        if any(form.is_same(refused) for refused in self._refused):
            return None
        if len(self._captured) + len(self._refused) >= self._limit:
            self._refuse(f"{self._limit} forms of call are known, and others came; a larger forms= captures more")
            return None
        try:
            made = CapturedForm(self.module, modules, form, tensors, self._grads)
        except Uncapturable as reason:
            self._refused.append(form)
            self._refuse(str(reason))
            return None
        self._captured.append(made)
        return made, tensors

    def _lease(self, captured: CapturedForm) -> Lease | None:
        """A set for one microbatch; None if there is none and cannot be."""
        ahead = captured is self._captured[0] and all(graphs.is_free for graphs in captured.sets)
        if ahead and len(captured.sets) < self.in_flight:  # other forms are rare: theirs are made when they are needed
            self._try(captured, lambda: captured.capture(self.in_flight))
        elif self._grows and not any(graphs.is_free for graphs in captured.sets):
            self.in_flight = max(self.in_flight, len(captured.sets) + 1)
        found: list[GraphSet | None] = []
        if not self._try(captured, lambda: found.append(captured.free_set(self.in_flight))):
            return None
        graphs = found[0]
        if graphs is None:
            raise SplitError(
                f"a captured module has graphs for in_flight={self.in_flight} microbatches",
                got="one more whose F begins before the W of an earlier one has run",
                fix=f"call run() of its Pending before, or pass in_flight={self.in_flight + 1}",
            )
        lease = Lease(graphs, self._grads)
        graphs.lease = weakref.ref(lease)
        return lease

    def _try(self, captured: CapturedForm, capture: Callable[[], None]) -> bool:
        """Whether what is captured could be; a form of which nothing can be is not tried again."""
        if captured not in self._captured:
            return False
        try:
            capture()
        except Uncapturable as reason:
            if not captured.sets:
                self._captured.remove(captured)
                self._refused.append(captured.form)
            self._refuse(str(reason))
            return False
        return True

    def _refuse(self, reason: str) -> None:
        if reason not in self.refusals:
            self.refusals.append(reason)
            name = type(self.module).__name__
            warnings.warn(f"{name} runs as it is, without CUDA graphs: {reason}", stacklevel=4)

    def _not_now(self, modules: list[nn.Module]) -> str | None:
        """Why no graph can be replayed at this moment, if so."""
        if top_saved_hooks()[0] is not None:
            return "a policy of sternway.saved, or other saved-tensor hooks, are active"
        if torch.is_anomaly_enabled():
            return "detect_anomaly looks at each operation"
        UNSEEN.look()
        if UNSEEN.since is self._without_hooks:  # nobody has put one on anything since we looked
            return None
        if (hooked := hooked_module(modules)) is not None:
            name = next((name for name, module in self.module.named_modules() if module is hooked), "")
            return f"the module {name or type(hooked).__name__} has hooks, which run in Python"
        self._without_hooks = UNSEEN.since
        return None


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch leaves it untyped

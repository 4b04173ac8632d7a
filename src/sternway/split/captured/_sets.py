"""The sets of graphs for one form of call: learnt from forwards that are thrown away, and captured when asked for."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sternway._torch.captures import preparing
from sternway._torch.cuda_graphs import all_modules, held_tensors, runs_compiled_code, stand_ins
from sternway._torch.hooks import both_hooks
from sternway._torch.tensors import ORDINARY, version_of
from sternway._tree import put_tensors
from sternway.split._backward import backward_input
from sternway.split.captured._form import CallForm
from sternway.split.captured._grads import GradBuffers
from sternway.split.captured._graphs import GraphSet, Outputs
from sternway.split.captured._look import TensorAttributes, Uncapturable, place_of, reason_of, watch

_REHEARSALS = 2  # the first makes gradients, the second adds to them; both load kernels and let libraries choose some


class CapturedForm:
    """A form of call, and its sets.

    Args:
        module: what is captured.
        modules: all that run in it.
        form: how it is called.
        tensors: the tensors of one such call.
        grads: the gradient buffers of the module.

    Attributes:
        attributes: tensors of the modules that graphs may read; if they are replaced, the graphs are out of date.
        sets: those that are captured.
        trained: the parameters that get gradients.

    Raises:
        Uncapturable: if it cannot be captured.
    """

    def __init__(
        self, module: nn.Module, modules: list[nn.Module], form: CallForm, tensors: Sequence[Tensor], grads: GradBuffers
    ) -> None:
        self.form, self.sets = form, list[GraphSet]()
        self._module, self._modules, self._grads = module, modules, grads
        self._parameters = dict(module.named_parameters())
        self._samples = [tensor.detach() for tensor in tensors]
        if runs_compiled_code(modules) and any(_copy(t).stride() != t.stride() for t in self._samples):
            raise Uncapturable("an argument has elements that share their memory, as expand() makes them")
        self.device = _one_device(module, form, tensors)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        with _same_buffers(module), self._aside() as stand_ins:
            for _ in range(_REHEARSALS):
                self._rehearse()
            got = {name: _grad_of(p, stand_ins) for name, p in self._parameters.items()}
            own = {id(p) for p in self._parameters.values() if p.grad is not None}
            self._read = watch(module, modules, self._forward_once)  # kept as long as the graphs
        for name, grad in got.items():
            if grad is not None and grad.layout is not torch.strided:
                raise Uncapturable(f"the gradient of {name} is sparse")
            if grad is not None and id(self._parameters[name]) in own and any(both_hooks(self._parameters[name])):
                raise Uncapturable(f"{name} has hooks, and a module holds it elsewhere than among its parameters")
        self.trained = [p for name, p in self._parameters.items() if got[name] is not None]
        del got
        self.attributes = TensorAttributes(modules)
        torch.cuda.empty_cache()  # what the rehearsals took is needed by the graphs

    def free_set(self, count: int) -> GraphSet | None:
        """A set that no microbatch uses; None if ``count`` are in use. Captures one if it must."""
        found = next((graphs for graphs in self.sets if graphs.is_free), None)
        if found is None and len(self.sets) < count:
            self.capture(len(self.sets) + 1)
            found = self.sets[-1]
        return found

    def capture(self, count: int) -> None:
        """Capture sets until there are ``count``."""
        with self._aside() as stand_ins, _without_collector():
            self._grads.include(self.trained)
            try:
                while len(self.sets) < count:
                    in_grad = self._grads.in_grad(self.trained, stand_ins)
                    self.sets.append(GraphSet(self._forward, self._inputs(), in_grad))
                    torch.clear_autocast_cache()
            except Exception as error:
                raise Uncapturable(f"{reason_of(error)}{place_of(error, self._module)}") from error

    def _inputs(self) -> list[Tensor]:
        needs = [needs_grad for *_, needs_grad in self.form.tensors]
        return [_copy(t).requires_grad_(grad) for t, grad in zip(self._samples, needs, strict=True)]

    def _forward(self, tensors: list[Tensor]) -> object:
        args, kwargs = put_tensors(self.form.tree, tensors)
        return self._module(*args, **kwargs)

    def _forward_once(self) -> None:
        inputs = self._inputs()
        before = [version_of(tensor) for tensor in inputs]
        self._forward(inputs)
        if before != [version_of(tensor) for tensor in inputs]:
            raise Uncapturable("the forward writes to one of its inputs, of which a graph has a copy")

    def _rehearse(self) -> None:
        """Run F, I and W, outside of any graph."""
        inputs = self._inputs()
        made = Outputs(self._forward(inputs))
        made.check(self.device)
        roots = [made.tensors[index] for index in made.needing]
        if not roots:
            raise Uncapturable("nothing that it returns needs a gradient")
        with torch.autocast("cuda", enabled=False):
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
            grads = [torch.zeros_like(root) for root in roots]
            _, pending = backward_input(roots, grads, wanted, own_thread=True)
            pending.run()
        torch.clear_autocast_cache()

    @contextmanager
    def _aside(self) -> Iterator[Mapping[int, Tensor]]:
        """A block for forwards that nobody sees, on a stream of its own; gradients and random numbers stay as they are.

        Yields:
            The stand-ins of the parameters.
        """
        current = torch.cuda.current_stream(self.device)
        grads = [(parameter, parameter.grad) for parameter in self._parameters.values()]
        self._stream.wait_stream(current)
        torch.clear_autocast_cache()  # it may have copies of weights that are gone when a graph is replayed
        with torch.random.fork_rng([self.device]), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            for parameter, _ in grads:
                parameter.grad = None
            try:
                with preparing(), stand_ins(self._modules, self._parameters.values()) as made:
                    yield made
            finally:
                for parameter, grad in grads:
                    parameter.grad = grad
                torch.clear_autocast_cache()
                current.wait_stream(self._stream)


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which compiled code relies on; without them where elements share their memory."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    """A block after which buffers are as they were. What is captured and not run does not change them."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _grad_of(parameter: Tensor, stand_ins: Mapping[int, Tensor]) -> Tensor | None:
    """What a rehearsal left: at the stand-in, or where a module holds the parameter elsewhere, at itself."""
    grad = stand_ins[id(parameter)].grad if id(parameter) in stand_ins else None
    return parameter.grad if grad is None else grad


def _one_device(module: nn.Module, form: CallForm, tensors: Sequence[Tensor]) -> torch.device:
    """The device of all tensors."""
    if (kind := form.varying()) is not None:
        raise Uncapturable(f"an argument is a {kind}, which may change unnoticed")
    everything = [*tensors, *held_tensors(all_modules(module))]
    for tensor in everything:
        if type(tensor) not in ORDINARY or tensor.layout is not torch.strided:
            raise Uncapturable(f"a {type(tensor).__name__} of {tensor.layout} is among its tensors")
    devices = {tensor.device for tensor in everything}
    if not tensors or len(devices) != 1 or next(iter(devices)).type != "cuda":
        found = ", ".join(sorted(map(str, devices))) or "no device"
        raise Uncapturable(f"its arguments, parameters and buffers are on {found}, not all on one GPU")
    return devices.pop()


@contextmanager
def _without_collector() -> Iterator[None]:
    """A block in which Python's collector frees nothing: to free what CUDA made is not allowed in a capture."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

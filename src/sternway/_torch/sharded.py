"""FSDP2 (``fully_shard``) under command: gather, reduce and free when told to, and not when a forward or backward runs.

FSDP gathers a module's parameters in hooks before its forward and its backward, and reduces gradients when the backward
has passed the module. A pipeline has many forwards before the first backward, and weight gradients long after input
gradients; so it tells FSDP when. While a module is *commanded*, FSDP's hooks do not run and its nodes are not in the
graph: a module computes on its gathered parameters like any other.

torch.distributed.pipelining reaches into FSDP in the same places, to reduce after the last backward.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from sternway._torch.probe import probe

Enter = Callable[[nn.Module, Any, Any], tuple[Any, Any]]
"""Called before a module's forward, with its arguments and keyword arguments; returns those that it gets."""
Leave = Callable[[nn.Module, Any], Any]
"""Called after a module's forward, with what it returned; returns what its caller gets."""


class FsdpUnit:
    """What one call of ``fully_shard`` made: one module, or several that are gathered together.

    Attributes:
        modules: its modules.
        policy: its ``MixedPrecisionPolicy``.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self.modules: tuple[nn.Module, ...] = tuple(state._modules)
        self.policy = state._mp_policy
        self._handle: Any = None  # of a gathering that nobody has waited for
        self._inputs: list[Any] = []  # of reductions under way

    @property
    def _groups(self) -> list[Any]:
        if hasattr(self._state, "_fsdp_param_groups"):
            return list(self._state._fsdp_param_groups)
        return [group for group in [self._state._fsdp_param_group] if group is not None]  # torch before 2.12

    @property
    def _parameters(self) -> Iterator[Any]:
        return (parameter for group in self._groups for parameter in group.fsdp_params)

    def sharded(self) -> list[nn.Parameter]:
        """Its parameters, as they are while not gathered."""
        return [parameter.sharded_param for parameter in self._parameters]

    @property
    def is_called(self) -> bool:
        """Whether its modules have forwards, and are not mere containers."""
        return all(type(module).forward is not nn.Module.forward for module in self.modules)

    def command(self, commanded: Callable[[], bool], enter: Enter, leave: Leave) -> None:
        """From now on, whenever ``commanded`` says so, FSDP's hooks do nothing, and forwards call these two.

        So do methods of ``register_fsdp_forward_method``, which ask the state, not the hooks.
        """
        own = [self._state._pre_forward_hook_handle, self._state._post_forward_hook_handle]
        handles = {handle.id: handle for each in own for handle in getattr(each, "handles", (each,))}
        for handle in handles.values():
            hooks = handle.hooks_dict_ref()
            theirs = hooks[handle.id]
            is_pre = any(hooks is module._forward_pre_hooks for module in self.modules)
            hooks[handle.id] = _pre(commanded, theirs) if is_pre else _post(commanded, theirs)
        for module in self.modules if self.is_called else ():
            vars(module)["forward"] = _inside(commanded, enter, leave, module, module.forward)
        before, after = self._state._pre_forward, self._state._post_forward

        def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return enter(module, args, kwargs) if commanded() else before(module, args, kwargs)

        def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
            return leave(module, output) if commanded() else after(module, args, output)

        self._state._pre_forward, self._state._post_forward = pre_forward, post_forward

    def gather(self) -> None:
        """Start to gather the parameters; ``wait`` before they are used."""
        self._handle = self.modules[0].unshard(async_op=True)  # type: ignore[operator]  # of FSDPModule

    def wait(self) -> float | None:
        """Let what comes next on this stream wait for the parameters, and put them into the modules.

        Returns:
            When they arrived, if the host had to wait for that; None if they were there, and on a GPU.
        """
        if self._handle is None:
            return None
        late = [work for group in self._groups for work in _late_works(group)]
        for work in late:
            work.wait()
        arrived = time.perf_counter() if late else None
        self._handle.wait()
        self._handle = None
        return arrived

    def free(self) -> None:
        """Free what was gathered: the modules have their sharded parameters again."""
        self.wait()
        self.modules[0].reshard()  # type: ignore[operator]  # of FSDPModule

    def keep_grads(self) -> None:
        """After a backward: add its gradients, in the dtype of the reduction, to those of earlier microbatches.

        Since torch 2.15, ``.grad`` of gathered parameters has that dtype, and so autograd does this.
        """
        for parameter in () if _accumulates_in_grad() else self._parameters:
            if parameter.reduce_dtype is not None and hasattr(parameter, "_unsharded_param"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()

    def abandon(self) -> None:
        """After a failure: free what is gathered, and forget gradients that were not reduced. Does not wait."""
        if self._handle is None:
            self.modules[0].reshard()  # type: ignore[operator]  # of FSDPModule
        self._handle = None
        self._inputs.clear()
        for parameter in self._parameters:
            if not _accumulates_in_grad():
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

    def reduce(self) -> None:
        """Start to reduce the gradients; ``finish`` before they are used."""
        for group in reversed(self._groups):
            self._inputs += _take_inputs(group.comm_ctx)
            group.post_backward()

    def finish(self) -> None:
        """Let what comes next on this stream wait for the reduced gradients, which are ``.grad`` of the parameters."""
        for group in self._groups:
            self._inputs += _take_inputs(group.comm_ctx)
        if self._state._is_root:
            self.modules[0].set_is_last_backward(True)  # type: ignore[operator]  # of FSDPModule
            context = self._state._state_ctx
            if getattr(context, "manual_backward_finalization_active", False) is None:  # torch 2.15
                context.manual_backward_finalization_active = False  # as its hook before the backward does
            self._state._root_post_backward_final_callback()

    def release(self) -> None:
        """After ``finish`` of all: let go of what the reductions read."""
        self._inputs.clear()


def fsdp_units(module: nn.Module) -> list[FsdpUnit]:
    """What ``fully_shard`` made inside a module, the outermost first. They can be used without a forward before."""
    from torch.distributed.fsdp import FSDPModule

    states: dict[int, Any] = {}
    for each in module.modules():
        if isinstance(each, FSDPModule):
            state: Any = each._get_fsdp_state()
            state._lazy_init()  # does nothing the second time, nor to what is inside of another
            states[id(state)] = state
    return [FsdpUnit(state) for state in states.values()]


def _pre(commanded: Callable[[], bool], theirs: Any) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if commanded() else theirs(module, args, kwargs)

    return hook


def _post(commanded: Callable[[], bool], theirs: Any) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return None if commanded() else theirs(module, args, output)

    return hook


def _inside(
    commanded: Callable[[], bool], enter: Enter, leave: Leave, module: nn.Module, forward: Callable[..., Any]
) -> Any:
    @functools.wraps(forward)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if not commanded():
            return forward(*args, **kwargs)
        args, kwargs = enter(module, args, kwargs)
        return leave(module, forward(*args, **kwargs))

    return stand_in


def _accumulates_in_grad() -> bool:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return not hasattr(FSDPParam, "accumulate_unsharded_grad_if_needed")


def _late_works(group: Any) -> list[Any]:
    """The gathering of a group that a host waits for, if it is under way."""
    result = group._all_gather_result
    work = None if result is None or result.all_gather_output.is_cuda else result.all_gather_work
    return [] if work is None or work.is_completed() else [work]


def _take_inputs(context: Any) -> list[Any]:
    """What reductions under way read, which FSDP would wait for before the next one.

    Whoever takes it must keep it until they are over: it was allocated on another stream than they run on.
    """
    if hasattr(context, "reduce_scatter_states"):
        found = list(context.reduce_scatter_states)
        context.reduce_scatter_states.clear()
        return found
    found, context.reduce_scatter_state = [context.reduce_scatter_state], None  # torch before 2.12
    return found


def _names(function: Any) -> set[str]:
    code = getattr(function, "__wrapped__", function).__code__
    return {*code.co_names, *(name for each in code.co_consts if hasattr(each, "co_names") for name in each.co_names)}


@probe(
    "FSDPState: _lazy_init, _is_root, _modules, _mp_policy, _pre_forward_hook_handle, _post_forward_hook_handle, "
    "_pre_forward, _post_forward, _root_post_backward_final_callback, _state_ctx",
    expected="are what a module's FSDP state has, and what its hooks and methods are registered by",
    features=("pipeline.sharded",),
)
def _state() -> bool:
    if not torch.distributed.is_available():
        return True
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    made = _names(FSDPState.init)
    fields = {"_modules", "_mp_policy", "_pre_forward_hook_handle", "_post_forward_hook_handle"}
    calls = {"_lazy_init", "_root_post_backward_final_callback"} <= set(dir(FSDPState))
    ends = {"is_last_backward", "_training_state", "_state_ctx"} <= _names(FSDPState._root_post_backward_final_callback)
    state = FSDPState()
    methods = {"_pre_forward", "_post_forward"} <= _names(register_fsdp_forward_method)
    groups = hasattr(state, "_fsdp_param_groups") or hasattr(state, "_fsdp_param_group")
    return (
        fields <= made
        and calls
        and ends
        and methods
        and groups
        and state._is_root is None
        and hasattr(FSDPModule, "_get_fsdp_state")
    )


@probe(
    "FSDPParamGroup._all_gather_result, AllGatherResult: all_gather_output, all_gather_work",
    expected="are a gathering under way, and the work to wait for",
    features=("pipeline.sharded",),
)
def _gathering() -> bool:
    if not torch.distributed.is_available():
        return True
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    waits = _names(FSDPParamGroup.wait_for_unshard)
    fields = {"all_gather_output", "all_gather_work"} <= set(AllGatherResult._fields)
    return fields and {"_all_gather_result", "all_gather_work"} <= waits


@probe(
    "FSDPParamGroup.post_backward, FSDPParam: accumulate_unsharded_grad_if_needed, to_accumulated_grad_if_needed, or "
    "unsharded_grad_dtype",
    expected="reduce what parameters have accumulated, in the dtype of the reduction",
    features=("pipeline.sharded",),
)
def _reduction() -> bool:
    if not torch.distributed.is_available():
        return True
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup

    context = FSDPCommContext()
    context_fields = _names(FSDPCommContext.lazy_init) | set(vars(context))
    group_fields = {"fsdp_params", "comm_ctx"} <= _names(FSDPParamGroup.__init__)
    inputs = bool({"reduce_scatter_states", "reduce_scatter_state"} & context_fields)
    if _accumulates_in_grad():
        gathered = _names(FSDPParam.init_unsharded_param)
        taken = _names(vars(FSDPParamGroup)["_take_unsharded_grads_to_reduce"])
        accumulated = {"unsharded_grad_dtype", "grad_dtype"} <= gathered and {"unsharded_param", "grad"} <= taken
    else:
        accumulated = (
            "unsharded_accumulated_grad" in _names(FSDPParamGroup.post_backward)
            and {"_unsharded_param", "reduce_dtype"} <= _names(FSDPParam.to_accumulated_grad_if_needed)
            and "unsharded_accumulated_grad" in _names(FSDPParam.accumulate_unsharded_grad_if_needed)
        )
    return group_fields and inputs and accumulated

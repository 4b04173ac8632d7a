"""``capture_step``: the step of an optimizer as a CUDA graph.

A replay writes to the parameters and the optimizer's state where they were at the capture, with the gradients that are
where they were, and with the numbers of that moment. So before each replay all of that is compared; a step with
anything else runs as it is, and what comes twice in a row is captured.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from sternway._torch import require
from sternway._torch.captures import GraphSequence, Places, capturing
from sternway._torch.cuda_graphs import has_step_hooks
from sternway.errors import SplitError
from sternway.split.captured._look import reason_of


def capture_step(optimizer: Optimizer) -> CapturedStep:
    """Capture the steps of an optimizer as a CUDA graph.

    Example:
        >>> optimizer = torch.optim.AdamW(stage.parameters(), capturable=True)   # doctest: +SKIP
        >>> step = split.capture_step(optimizer)                                 # doctest: +SKIP
        >>> stage(x).sum().backward()                                            # doctest: +SKIP
        >>> step()                               # in the place of optimizer.step()  # doctest: +SKIP

    The first step runs as it is, and makes the optimizer's state; the second is captured. A step whose gradients are in
    other memory, or whose settings are other numbers, runs as it is: ``split.capture`` and ``zero_grad()`` leave
    gradients where they are. A learning rate that changes is to be a tensor on the GPU.

    Args:
        optimizer: made with ``capturable=True``, or ``torch.optim.SGD``; its parameters are on a CUDA device.

    Raises:
        SplitError: if the optimizer keeps numbers in Python, which a replay would not change, or is not on a GPU.
    """
    return CapturedStep(optimizer)


class CapturedStep:
    """Steps of an optimizer, as a CUDA graph where it can be; ``capture_step`` makes one.

    Attributes:
        optimizer: what steps.
        replays: how many steps were replays.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        require("split.capture")
        if not (type(optimizer) is SGD or all(group.get("capturable") for group in optimizer.param_groups)):
            raise SplitError(
                "an optimizer whose step is captured must keep no numbers in Python",
                got=f"{type(optimizer).__name__} without capturable=True",
                fix="make it with capturable=True, if it has that; or call optimizer.step()",
            )
        self.optimizer, self.replays = optimizer, 0
        self._device = _one_device(optimizer)
        self._last: list[Any] | None = None  # what the last step worked with
        self._graph: GraphSequence | None = None  # of such a step
        self._waits = 0  # how often in a row it was another
        self._told = False

    def __call__(self) -> None:
        """Step the optimizer."""
        used = None if has_step_hooks(self.optimizer) else _used(self.optimizer, self._device)
        if used is None or used != self._last:
            if self._graph is not None:
                torch.cuda.synchronize(self._device)  # it may be running
                self._graph = None
            self._waits += 1
            if self._waits > 3:
                self._tell("hooks run in it" if used is None else "its gradients or settings are others in each step")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*capturable=True.*without CUDA graph capture")
                self.optimizer.step()
            self._last = used and _used(self.optimizer, self._device)  # the first step makes the state
            return
        if self._graph is None:
            self._graph = self._capture()
        if self._graph is None:
            self.optimizer.step()
            return
        self._waits = 0
        self._graph.replay()
        self.replays += 1

    def _capture(self) -> GraphSequence | None:
        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), capturing(torch.cuda.graph_pool_handle(), Places()) as graph:
                self.optimizer.step()
        except Exception as error:
            self._tell(reason_of(error))
            return None
        current.wait_stream(stream)
        return graph

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            name = type(self.optimizer).__name__
            warnings.warn(f"the steps of {name} run as they are, without a CUDA graph: {reason}", stacklevel=3)


def _one_device(optimizer: Optimizer) -> torch.device:
    devices: set[torch.device] = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        raise SplitError(
            "an optimizer whose step is captured must have its parameters on one CUDA device",
            got=f"parameters on {', '.join(sorted(map(str, devices)))}",
            fix='call model.to("cuda") before the optimizer is made',
        )
    return devices.pop()


def _used(optimizer: Optimizer, device: torch.device) -> list[Any]:
    """All that a step works with: the places of tensors on the device, and numbers."""
    found: list[Any] = []

    def note(value: Any) -> None:
        if not isinstance(value, Tensor):
            found.extend((type(value), value))
        elif value.device != device:
            found.append(value.tolist())
        else:
            found.extend((value.data_ptr(), value.stride(), value.dtype))

    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                note(value)
        for parameter in group["params"]:
            note(parameter)
            note(parameter.grad)
            for value in optimizer.state.get(parameter, {}).values():
                note(value)
    return found

"""``torch.distributed.pipelining._backward``, by ``sternway.split``."""

from sternway.split import stage_backward, stage_backward_input, stage_backward_weight

__all__ = ["stage_backward", "stage_backward_input", "stage_backward_weight"]

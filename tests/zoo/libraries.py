"""Makes timm and torchvision importable beside a CPU build of torch.

The package registry's torchvision is built for CUDA. Beside a CPU torch its C++ operators do not load, and its import
then fails at two of them, which detection models use. Their schemas are enough for the import.
"""

from __future__ import annotations

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything here is made on the spot

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
if not torch.version.cuda:
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

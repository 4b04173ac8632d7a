"""Stages, a schedule and a transport make a training step, over torch.distributed or in one process.

from sternway import pipeline

pipe = pipeline.Pipeline(model, cuts="balanced", schedule="auto", n_microbatches=8, loss_fn=loss, sample=microbatch)
optimizer = torch.optim.AdamW(pipe.parameters())
result = pipe.step(inputs, target=target)
"""

from sternway.pipeline._build import partition
from sternway.pipeline._dist import DistTransport
from sternway.pipeline._microbatch import Chunk, Presplit, Replicate
from sternway.pipeline._pipeline import Pipeline
from sternway.pipeline._profile import Profile, profile
from sternway.pipeline._result import StepResult
from sternway.pipeline._saving import CheckpointWarning, Resumed, Saving
from sternway.pipeline._stage import WithSkips
from sternway.pipeline._transport import LocalTransport, Transport

__all__ = [
    "CheckpointWarning",
    "Chunk",
    "DistTransport",
    "LocalTransport",
    "Pipeline",
    "Presplit",
    "Profile",
    "Replicate",
    "Resumed",
    "Saving",
    "StepResult",
    "Transport",
    "WithSkips",
    "partition",
    "profile",
]

"""Stages, a schedule and a transport make a training step, over torch.distributed or in one process.

from sternway import pipeline

pipe = pipeline.Pipeline(model, cuts="balanced", schedule="auto", n_microbatches=8, loss_fn=loss, sample=microbatch)
optimizer = torch.optim.AdamW(pipe.parameters())
result = pipe.step(inputs, target=target)
"""

from sternway.pipeline._pipeline import Pipeline
from sternway.pipeline.build._fit import Fit, fit
from sternway.pipeline.build._make_weights import make_weights
from sternway.pipeline.build._plan import partition
from sternway.pipeline.build._profile import Profile, profile
from sternway.pipeline.build._rank_bytes import RankBytes
from sternway.pipeline.build._read_weights import read_weights
from sternway.pipeline.build._ways import Way
from sternway.pipeline.build._weigh import LargeTensor
from sternway.pipeline.checkpoint._saving import CheckpointWarning, Resumed, Saving
from sternway.pipeline.pretrained._load import from_pretrained
from sternway.pipeline.step._microbatch import Chunk, Presplit, Replicate
from sternway.pipeline.step._result import StepResult
from sternway.pipeline.step._scaler import GradScaler
from sternway.pipeline.step._stage import WithSkips
from sternway.pipeline.step._tuner import TriedPlan
from sternway.pipeline.transport._dist import DistTransport
from sternway.pipeline.transport._local import LocalTransport
from sternway.pipeline.transport._transport import Transport

__all__ = [
    "CheckpointWarning",
    "Chunk",
    "DistTransport",
    "Fit",
    "GradScaler",
    "LargeTensor",
    "LocalTransport",
    "Pipeline",
    "Presplit",
    "Profile",
    "RankBytes",
    "Replicate",
    "Resumed",
    "Saving",
    "StepResult",
    "Transport",
    "TriedPlan",
    "Way",
    "WithSkips",
    "fit",
    "from_pretrained",
    "make_weights",
    "partition",
    "profile",
    "read_weights",
]

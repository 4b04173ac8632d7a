"""The zoo: architectures of transformers, timm, torchvision, diffusers and PEFT, in tiny random configurations."""

from __future__ import annotations

from zoo import other_models, transformers_models

MODELS = {entry.name: entry for entry in (*transformers_models.ENTRIES, *other_models.ENTRIES)}

"""The libraries that only this folder needs, imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sternway.errors import PipelineError


def library(name: str) -> Any:
    """A module of another project.

    Raises:
        PipelineError: if it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise PipelineError(
            f"pretrained models need {name.partition('.')[0]}",
            got=str(error),
            fix="pip install 'transformers>=5' safetensors",
        ) from error

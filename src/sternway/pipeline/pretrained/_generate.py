"""``generate`` of transformers, where the whole model is in one process."""

from __future__ import annotations

from typing import Any

from sternway.errors import PipelineError


def generate(model: Any, ranks: int, args: Any, kwargs: Any) -> Any:
    """What ``model.generate`` returns in evaluation mode.

    Raises:
        PipelineError: if the model is not whole in this process, or does not generate.
    """
    if ranks > 1:
        raise PipelineError(
            "generate needs the whole model in one process",
            got=f"a pipeline over {ranks} processes",
            fix="write it with pipe.save_pretrained(folder), and load the folder with transformers",
        )
    if not hasattr(model, "generate"):
        raise PipelineError(
            "generate needs a model of transformers that generates", got=type(model).__name__, fix="use pipe.evaluate"
        )
    training = model.training
    model.eval()
    try:
        return model.generate(*args, **kwargs)
    finally:
        model.train(training)

"""One training step: microbatches go through stages in the order of the schedule, and gradients are put together."""

"""Run a build: worker processes, what is kept from one run to the next, and measuring a model."""

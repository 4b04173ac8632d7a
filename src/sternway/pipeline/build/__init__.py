"""From a model or its stages to a plan: cut the model, measure its parts, choose a schedule, check the arguments."""

"""The stack of saved-tensor hooks, and the frames of checkpoints."""

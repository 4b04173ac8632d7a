"""How tensors and decisions travel between ranks: in one process, or over torch.distributed."""

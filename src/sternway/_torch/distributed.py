"""Process groups and stores, FSDP and DDP, torch.distributed.pipelining."""

"""Dynamo and functionalization: what runs while torch.compile traces."""

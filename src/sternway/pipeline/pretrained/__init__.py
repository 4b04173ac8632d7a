"""Checkpoints of Hugging Face's transformers: each rank reads and writes its own tensors."""

"""GRPO post-training for language models, as TorchRL components."""

"""``python -m torchrl_grpo export``: the model of a checkpoint, for Hugging Face and vLLM."""

"""Environments, graders and protocols of other projects: OpenEnv, reasoning-gym, verifiers, MCP,
TorchRL's chat transforms and weight synchronization, OpenAI's and Anthropic's clients (``agents``),
the servers of vLLM and SGLang, bitsandbytes, and ``sandbox``, in which programs run. The core does
not import them: a run loads those that it needs by their names in ``host/extras.py``.
"""

"""Environments, graders and protocols of other projects: OpenEnv, reasoning-gym, verifiers, TorchRL's
chat transforms, OpenAI's and Anthropic's clients (``agents``), and the servers of vLLM and SGLang.
"""

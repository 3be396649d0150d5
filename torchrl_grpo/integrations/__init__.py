"""Environments and protocols of other projects: OpenEnv, reasoning-gym, verifiers, OpenAI's and
Anthropic's clients (``agents``), and the servers of vLLM and SGLang.
"""

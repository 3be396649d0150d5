"""Environments and protocols of other projects: OpenEnv, reasoning-gym, verifiers, Anthropic's
messages, and the servers of vLLM and SGLang.
"""

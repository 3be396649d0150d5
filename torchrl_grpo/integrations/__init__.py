"""Environments and protocols of other projects: OpenEnv, reasoning-gym, verifiers, and Anthropic's
messages.
"""

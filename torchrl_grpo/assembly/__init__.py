"""Builds a run from a validated config: finds out and checks what is known before weights load, makes
the components of each role, and connects them.
"""

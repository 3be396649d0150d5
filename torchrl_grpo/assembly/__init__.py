"""Builds a run from a validated config: checks it, makes what is known before weights load, then the
parts of each role, and connects them.
"""

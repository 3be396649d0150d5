"""Builds a run from a validated config: everything that is known before weights load, then the
components and the processes that they run in.
"""

"""A run from Python: the call, its objects as files and names, its result, and its display in a
notebook.
"""

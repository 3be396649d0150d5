"""Advice before a run: whether it works, its cost, how to split the devices, how to migrate from another library."""

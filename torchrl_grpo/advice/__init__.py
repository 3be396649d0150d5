"""Advice before a run: will it work, what it takes, how to split the devices, how to come from another library."""

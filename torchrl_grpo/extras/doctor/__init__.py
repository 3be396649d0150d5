"""The dry run of a config (``dry_run=true``), with checks, their fixes and a forecast; and where
numbers that are not finite come from.
"""

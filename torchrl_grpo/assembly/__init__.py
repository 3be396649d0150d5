"""Builds a run from a checked config: the only place that knows both the config and the components."""

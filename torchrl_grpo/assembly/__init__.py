"""From a checked config to a run: the only place that knows both the config and the components."""

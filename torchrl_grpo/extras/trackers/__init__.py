"""Services that get a run's metrics while it lasts."""

"""The dry run of a config (``dry_run=true``): checks with their fixes, and a forecast of the run."""

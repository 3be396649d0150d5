"""Builds a run from a validated config: the only package that knows both config and components."""

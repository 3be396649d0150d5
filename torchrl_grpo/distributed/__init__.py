"""Roles as Ray actors. Nothing here imports ray before it is used, so the package imports without it."""

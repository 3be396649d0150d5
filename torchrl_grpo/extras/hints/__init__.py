"""Hints in errors for mistakes that new users make."""

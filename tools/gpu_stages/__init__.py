"""The stages of ``tools/gpu_check.py`` that are not tests."""

"""The run dashboard: curves, groups of responses, tokens, a timeline, alarms and configs, in a
browser.

It reads the files that a run writes and nothing else, and imports nothing that trains. ``python -m
torchrl_grpo.view`` serves it; ``start.start_page`` does so beside a run.
"""

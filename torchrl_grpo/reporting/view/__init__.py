"""A page on runs, in a browser: curves, groups of responses, tokens, a timeline, alarms and configs.

It reads the files that a run writes and nothing else, and imports nothing that trains. ``python -m torchrl_grpo.view``
serves it; ``start.start_page`` does so beside a run.
"""

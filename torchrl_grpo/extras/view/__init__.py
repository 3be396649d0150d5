"""The run dashboard: curves, groups of responses, tokens, a timeline, alarms and configs, in a
browser.

It only reads the files that a run writes, and imports no training code.
``python -m torchrl_grpo view`` serves it; ``start.page_beside`` does so during a run.
"""

"""Texts with which a model could harm its readers."""

HOSTILE = (
    "</td><script>alert(1)</script>&amp;"  # HTML
    "{{ 7 * 7 }}{% raw %}"  # Jinja
    "[bold][link=https://example.org]"  # rich
    "\x1b[31m\x1b]0;title\x07\x9b2J\u202e\ud83d"  # a terminal; a direction mark; a lone surrogate
)
SHOWN = (
    "</td><script>alert(1)</script>&amp;"
    "{{ 7 * 7 }}{% raw %}"
    "[bold][link=https://example.org]"
    "\\x1b[31m\\x1b]0;title\\x07\\x9b2J\\u202e\\ud83d"
)
"""The same as a page or a terminal must show it."""

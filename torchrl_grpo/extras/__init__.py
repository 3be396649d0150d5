"""Tools that read runs or files of other libraries, the call from Python, dry runs, hints in errors,
and services that get a run's metrics. The core does not import them: ``api`` and the commands do, and
a run loads those that it calls by their names in ``host/extras.py``.
"""

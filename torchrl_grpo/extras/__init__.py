"""Tools that read runs or files of other libraries, dry runs, and services that get a run's metrics.
Nothing else in the package imports them: a run finds those that it calls in `host/extras.py`.
"""

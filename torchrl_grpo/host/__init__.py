"""The process and its machine: start-up, signals, child processes, files of a run, and the
objects that a config names. Imports nothing heavy.
"""

"""The process and its machine: start-up, signals, child processes, and files of a run. Imports
nothing heavy.
"""

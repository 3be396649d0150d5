"""The process and its machine: start-up, signals, child processes, and the files of a run. Imports nothing heavy."""

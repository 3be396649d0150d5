"""What reads runs, or files of other libraries: nothing else in the package imports it."""

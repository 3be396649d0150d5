"""Pages, pictures and lists of samples of runs, from the files that they wrote."""

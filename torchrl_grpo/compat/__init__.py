"""Private names and quirks of the libraries this package builds on, one file for each library."""

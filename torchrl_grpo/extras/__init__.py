"""Tools that read runs, or files of other libraries. Nothing else in the package imports them."""

"""Tasks: problems, prompt formats and scorers, one file each."""

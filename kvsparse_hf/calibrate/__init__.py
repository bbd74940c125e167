"""Plans that are made once per model from text: each method's own file, read back by its cache."""

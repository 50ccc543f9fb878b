"""One short story per command: validate, hash, convert."""

"""How evenly windows are laid out, compared with random microbatches."""

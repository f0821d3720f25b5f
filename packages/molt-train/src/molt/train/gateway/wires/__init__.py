"""One module a wire: how its requests read, and how its replies are written."""

"""What decides: the training loop with all that it waits for, and the desk that answers workers."""

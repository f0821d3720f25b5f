"""What exact capture costs, compared with a server that only answers."""

"""Whether every algorithm learns, on the demo task and through the whole stack."""

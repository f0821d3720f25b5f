"""How much waiting the asynchronous loop takes away from the actor."""

"""A run of days in minutes: thousands of rollouts on the real pool, gateway and training loop, under every fault.

The engine is scripted and the actor learns nothing; everything between them is what a run is made of.
docs/simulation.md says what it proves and how to read it.
"""

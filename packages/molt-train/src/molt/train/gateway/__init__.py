"""Stages 2 and 3, session and capture: the model endpoint under a session URL, and the record of what it sampled."""

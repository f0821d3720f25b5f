"""Settings of every test: hypothesis draws the same examples each time, and no example is judged by the clock."""

from hypothesis import settings

settings.register_profile("molt", deadline=None, derandomize=True)
settings.load_profile("molt")

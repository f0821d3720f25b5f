"""Stage 6, window: complete groups become the microbatches of every rank, with one denominator over all of them."""

from molt.train.window.build import AdvantageFn, build_window, window_stats
from molt.train.window.filter import FilterResult, usable

__all__ = ["AdvantageFn", "FilterResult", "build_window", "usable", "window_stats"]

"""Stage 6, window: complete groups become the microbatches of every rank, with one denominator over all of them."""

from molt.train.window.build import AdvantageFn, build_window, lay_out, window_stats
from molt.train.window.filter import FilterResult, usable

__all__ = ["AdvantageFn", "FilterResult", "build_window", "lay_out", "usable", "window_stats"]

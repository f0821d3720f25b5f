"""The reward picture is a PNG with the curve, and drawing it costs nothing until it is drawn."""

import subprocess
import sys

import pytest
from matplotlib.figure import Figure

from molt.train.observe.picture import draw_reward_curve

ROWS = [{"step": step, "reward_mean": step / 10} for step in range(1, 6)]


@pytest.fixture
def axes(monkeypatch):
    """The axes of every figure that was saved."""
    drawn = []
    save = Figure.savefig

    def spy(self, *args, **kwargs):
        drawn.extend(self.axes)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    return drawn


def test_updates_over_mean_reward(tmp_path, axes):
    draw_reward_curve(ROWS, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (line,) = axes[0].lines
    assert list(line.get_xdata()) == [1, 2, 3, 4, 5]
    assert list(line.get_ydata()) == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert (axes[0].get_xlabel(), axes[0].get_ylabel()) == ("update", "mean reward")


def test_evaluations_are_points_of_their_own(tmp_path, axes):
    draw_reward_curve(ROWS, tmp_path / "reward.png", evaluations=[(0, 0.05), (5, 0.55)])
    _, points = axes[0].lines
    assert (list(points.get_xdata()), list(points.get_ydata())) == ([0, 5], [0.05, 0.55])
    assert (points.get_marker(), points.get_linestyle()) == ("o", "None")


def test_a_run_without_updates_still_has_a_picture(tmp_path):
    draw_reward_curve([], tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size > 0


def test_matplotlib_is_imported_when_something_is_drawn():
    code = "import sys, molt.train.observe.picture; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "False"

"""The live view: a plain line an update where nobody watches, a bar with the same facts on a terminal."""

import io

from rich.console import Console

from molt.train.observe.progress import ProgressView, summarise


def row(step, total=2.0, reward=0.5):
    return {
        "step": step,
        "reward_mean": reward,
        "num_rollouts": 128,
        "num_action_tokens": 5000,
        "staleness_mean": 0.75,
        "staleness_max": 2,
        "timing": {"total": total},
    }


def test_the_summary_has_reward_throughput_staleness_and_time_left():
    assert summarise(row(1), seconds_left=3725.4) == (
        "reward 0.500  64.0 rollouts/s  2500 tokens/s  staleness 0.75 (max 2)  left 1:02:05"
    )


def test_a_pipe_gets_one_plain_line_an_update():
    stream = io.StringIO()
    with ProgressView(4, console=Console(file=stream, width=40)) as view:
        view.update(row(1, total=2.0))
        view.update(row(2, total=4.0))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("update 1/4  reward 0.500")
    assert lines[0].endswith("left 0:00:06")
    assert lines[1].endswith("left 0:00:06")  # two updates left at a mean of three seconds
    assert "\x1b" not in stream.getvalue()


def test_the_time_left_follows_recent_updates_only():
    stream = io.StringIO()
    with ProgressView(111, console=Console(file=stream, width=200)) as view:
        view.update(row(1, total=1000.0))
        for step in range(2, 12):
            view.update(row(step, total=1.0))
    assert stream.getvalue().splitlines()[-1].endswith("left 0:01:40")


def test_a_resumed_run_counts_from_its_checkpoint():
    stream = io.StringIO()
    with ProgressView(100, console=Console(file=stream, width=200)) as view:
        view.update(row(91, total=1.0))
    assert stream.getvalue().startswith("update 91/100")
    assert stream.getvalue().rstrip().endswith("left 0:00:09")


def test_a_terminal_gets_a_bar():
    stream = io.StringIO()
    with ProgressView(4, console=Console(file=stream, force_terminal=True, width=160)) as view:
        view.update(row(3, reward=0.875))
    text = stream.getvalue()
    assert "3/4" in text
    assert "reward 0.875" in text
    assert "update 3/4  " not in text


def test_a_terminal_shows_that_it_waits_before_the_first_update():
    stream = io.StringIO()
    with ProgressView(4, console=Console(file=stream, force_terminal=True, width=160)):
        pass
    assert "waiting for rollouts" in stream.getvalue()


def test_the_default_is_stderr(capsys):
    with ProgressView(1) as view:
        view.update(row(1))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "reward 0.500" in captured.err

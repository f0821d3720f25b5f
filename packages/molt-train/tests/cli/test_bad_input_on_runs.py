"""Bad input of the commands that look at a run: one line that names the fault and the fix, exit code 2."""

import sys

import pytest

from molt.train.cli import main
from molt.train.config import Config, load_config, to_toml
from molt.train.pool.ledger import Ledger
from molt.train.records.rollout import Outcome


@pytest.fixture
def config(tmp_path, model, agent):
    """A configuration that can be evaluated; a test puts a fault in."""
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    path = tmp_path / "run.toml"
    path.write_text(f"""
[model]
path = "{model}"
[eval]
path = "{tmp_path / "held_out.jsonl"}"
[agent]
path = "{agent}"
[run]
dir = "{tmp_path / "run"}"
""")
    return path


@pytest.fixture
def run(tmp_path, config):
    """The folder of a run that has not made an update."""
    folder = tmp_path / "recorded"
    Ledger(folder / "ledger.db").close()
    (folder / "config.toml").write_text(to_toml(load_config(config, [f"run.dir={folder}"], Config)))
    return folder


@pytest.fixture
def refused(tmp_path, capsys):
    """Run a command that must end as bad input does, and make nothing; gives its one line."""

    def entries():
        """All but the byte code that Python keeps of an agent, unless it is told not to."""
        return {path for path in tmp_path.iterdir() if path.name != "__pycache__"}

    def run(*arguments):
        had_ray, before = "ray" in sys.modules, entries()
        assert main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = err.splitlines()
        assert ("ray" in sys.modules) == had_ray, "Ray takes seconds, and is for runs that start"
        assert entries() == before
        return line.removeprefix("molt-train: error: ")

    return run


@pytest.mark.parametrize("command", [["replay"], ["regrade", "--agent", "a.py"], ["status"]])
def test_a_folder_that_holds_no_run(refused, tmp_path, command):
    assert repr(str(tmp_path / "nowhere")) in refused(*command, tmp_path / "nowhere")


def test_an_evaluation_without_held_out_rows(config, refused):
    assert (
        refused("eval", config, "eval.path=") == "eval.path is empty: give it in the config file, or as eval.path=..."
    )


@pytest.mark.parametrize("key", ["model.path", "agent.path"])
def test_an_evaluation_without_what_it_needs(config, refused, key):
    assert refused("eval", config, f"{key}=") == f"{key} is empty: give it in the config file, or as {key}=..."


def test_an_evaluation_that_has_nowhere_to_write(config, refused):
    assert refused("eval", config, "run.dir=") == "run.dir is empty: give the folder of the run, or --out DIR"


def test_an_evaluation_without_workers(config, refused):
    assert refused("eval", config, "agent.num_workers=0").startswith("agent.num_workers is 0, but an evaluation")


def test_an_evaluation_that_is_misconfigured(config, refused):
    assert (
        refused("eval", config, "eval.smaples=2")
        == "unknown key 'eval.smaples'; the nearest known key is 'eval.samples'"
    )
    assert refused("eval", config, "eval.top_p=2") == "eval.top_p is 2.0; it must be above 0 and at most 1"


@pytest.mark.parametrize("name", ["best", "latest"])
def test_a_checkpoint_of_a_run_that_has_none(config, refused, tmp_path, name):
    message = refused("eval", config, "--checkpoint", name)
    assert message.startswith(
        f"--checkpoint is {name!r}, but there is none in {str(tmp_path / 'run' / 'checkpoints')!r}: "
    )


def test_a_checkpoint_that_is_none(config, refused, tmp_path):
    folder = tmp_path / "nowhere"
    message = refused("eval", config, "--checkpoint", folder, "eval.samples=2")
    assert message == f"--checkpoint is {str(folder)!r}, but {str(folder / 'model')!r} is no folder of weights"


@pytest.mark.parametrize("command", [["eval"], ["replay"]])
def test_a_target_that_is_there_already(config, run, refused, command):
    source = config if command == ["eval"] else run
    if command == ["replay"]:
        with_window(run)
    message = refused(*command, source, "--out", config.parent)
    assert message == f"--out is {str(config.parent)!r}, which exists: give a new folder"


def with_window(run):
    ledger = Ledger(run / "ledger.db")
    ledger.record_window(1, 0, [])
    ledger.close()


def test_a_replay_of_a_run_that_has_not_trained(run, refused):
    assert refused("replay", run).endswith("has no recorded windows: the run has not made its first update")


def test_a_replay_never_writes_into_the_run(run, refused):
    with_window(run)
    assert refused("replay", run, "--out", run / "again").startswith(
        f"--out is {str(run / 'again')!r}, in the folder of"
    )


def test_a_replay_has_no_use_for_how_rollouts_are_made(run, refused):
    with_window(run)
    message = refused("replay", run, "algorithm.estimator=rloo", "engine.num_engines=2")
    assert message.startswith("engine.num_engines has no effect in a replay")


def test_a_replay_with_grades_that_are_not_there(run, refused):
    with_window(run)
    assert refused("replay", run, "--grades", "strict").endswith("it has none: make them with `molt-train regrade`")
    ledger = Ledger(run / "ledger.db")
    ledger.add_grade("lenient", "g1.0", Outcome(kind="completed", reward=1.0))
    ledger.close()
    assert refused("replay", run, "--grades", "strict").endswith("has no such grades; it has lenient")


def test_a_grader_that_is_missing(run, refused, agent, tmp_path):
    assert "define `grade(self, ctx, answer)`" in refused("regrade", run, "--agent", agent)
    message = refused("regrade", run, "--agent", tmp_path / "none.py")
    assert message == f"--agent: {tmp_path / 'none.py'}: no such file"


GRADER = """
from molt.agents import ChatAgent, ChatAgentRunner

class Agent(ChatAgent):
    async def run(self, ctx):
        return "an answer"

    def grade(self, ctx, answer):
        return 1.0

class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Agent)
"""


def test_a_run_that_still_goes_on_is_not_graded(run, refused, agent):
    agent.write_text(GRADER)
    ledger = Ledger(run / "ledger.db")
    assert "is in use by another process" in refused("regrade", run, "--agent", agent)
    ledger.close()


def test_grades_of_a_name_are_not_overwritten(run, refused, agent):
    agent.write_text(GRADER)
    ledger = Ledger(run / "ledger.db")
    ledger.add_grade("strict", "g1.0", Outcome(kind="completed", reward=1.0))
    ledger.close()
    message = refused("regrade", run, "--agent", agent, "--name", "strict")
    assert message.startswith("--name is 'strict', under which the ledger has grades already")


def test_an_option_that_does_not_exist(run, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(run), "--fast"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --fast" in capsys.readouterr().err

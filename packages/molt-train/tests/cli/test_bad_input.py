"""Bad input ends a command before anything is started: one line that names the fault and the fix, exit code 2."""

import json
import socket
import sys

import pytest

from molt.train.cli import main
from molt.train.engine.scripted_tokenizer import scripted_tokenizer


@pytest.fixture
def config(tmp_path, model, agent):
    """A configuration that has no fault; a test puts one in."""
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    path = tmp_path / "run.toml"
    path.write_text(f"""
[model]
path = "{model}"
[data]
path = "{tmp_path / "tasks.jsonl"}"
[agent]
path = "{agent}"
[run]
dir = "{tmp_path / "run"}"
""")
    return path


@pytest.fixture
def refused(tmp_path, capsys):
    """Run a command that must end as bad input does; gives its one line."""

    def run(*arguments):
        had_ray = "ray" in sys.modules
        assert main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("molt-train: error: ")
        assert ("ray" in sys.modules) == had_ray, "Ray takes seconds, and is for runs that start"
        assert not (tmp_path / "run").exists()
        return line.removeprefix("molt-train: error: ")

    return run


@pytest.fixture
def taken_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


@pytest.mark.parametrize("command", ["run", "server", "sft"])
def test_an_unknown_key_names_the_nearest_known_one(config, refused, command):
    message = "unknown key 'train.num_update'; the nearest known key is 'train.num_updates'"
    assert refused(command, config, "train.num_update=3") == message
    with config.open("a") as file:
        file.write("[train]\nnum_update = 3\n")
    assert refused(command, config) == message


def test_a_missing_configuration(refused, tmp_path):
    path = tmp_path / "none.toml"
    assert refused("run", path) == f"config file {str(path)!r} does not exist"


def test_a_configuration_that_cannot_be_read(refused, tmp_path):
    assert refused("run", tmp_path) == f"config file {str(tmp_path)!r} cannot be read: Is a directory"


@pytest.mark.parametrize("key", ["model.path", "data.path", "run.dir", "agent.path"])
def test_a_key_that_a_run_cannot_do_without(config, refused, key):
    assert refused("run", config, f"{key}=") == f"{key} is empty: give it in the config file, or as {key}=..."


def test_a_missing_agent_file(config, refused, tmp_path):
    path = tmp_path / "none.py"
    message = refused("run", config, f"agent.path={path}")
    assert message.startswith("agent.path: ")
    assert str(path) in message


def test_an_agent_module_without_an_agent_runner(config, refused, tmp_path):
    (tmp_path / "agent.py").write_text("class Agent: pass\n")
    message = refused("run", config)
    assert message.startswith("agent.path: ")
    assert str(tmp_path / "agent.py") in message
    assert "AgentRunner" in message


def test_an_agent_module_that_cannot_be_imported(config, refused, tmp_path):
    (tmp_path / "agent.py").write_text("import no_such_module\n")
    message = refused("run", config)
    assert message.startswith("agent.path: ")
    assert "no_such_module" in message


def test_a_model_path_that_is_no_folder(config, refused, tmp_path):
    path = tmp_path / "nowhere"
    assert refused("run", config, f"model.path={path}") == f"model.path is {str(path)!r}, which is no folder"


def test_a_model_path_without_a_chat_template(config, refused, tmp_path):
    folder = scripted_tokenizer(tmp_path / "bare")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    message = refused("run", config, f"model.path={folder}")
    assert message.startswith(f"model.path {str(folder)!r} has no chat template: add ")


def test_a_model_path_without_a_tokenizer(config, refused, tmp_path):
    (tmp_path / "empty").mkdir()
    message = refused("run", config, f"model.path={tmp_path / 'empty'}")
    assert message.startswith(f"model.path {str(tmp_path / 'empty')!r} has no fast tokenizer")


@pytest.mark.parametrize("key", ["data.path", "eval.path"])
def test_a_task_row_that_is_not_json_is_named_by_file_and_line(config, refused, tmp_path, key):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    assert refused("run", config, f"{key}={path}").startswith(f"{path}:3: not JSON: ")


def test_a_missing_task_file(config, refused, tmp_path):
    message = refused("run", config, f"data.path={tmp_path / 'none.jsonl'}")
    assert message == f"task file {str(tmp_path / 'none.jsonl')!r} cannot be read: No such file or directory"


def test_a_missing_file_of_a_data_set(config, refused):
    message = refused("run", config, "data.path=", 'data.sets=[{name="a", path="none.jsonl"}]')
    assert message == "task file 'none.jsonl' cannot be read: No such file or directory"


@pytest.mark.parametrize("command", ["run", "server"])
def test_a_port_in_use(config, refused, taken_port, command):
    message = refused(command, config, f"server.port={taken_port}")
    assert message == (
        f"port {taken_port} on 127.0.0.1 is in use; stop what holds it, or set server.port=0 for a free one"
    )


def test_an_address_that_others_can_reach_without_a_token(config, refused):
    assert "set server.token" in refused("server", config, "server.host=0.0.0.0")


def test_a_group_of_one_for_an_estimator_that_compares(config, refused):
    message = refused("run", config, "rollout.group_size=1")
    assert message.startswith(
        "rollout.group_size is 1, but algorithm.estimator 'grpo' compares the rollouts of a group"
    )


def test_a_cut_distribution_under_the_correction(config, refused):
    message = refused("run", config, "rollout.top_p=0.9")
    assert message.startswith("rollout.top_p is 0.9, which biases the ratios of algorithm.correction 'tis'")


def test_a_conversation_that_is_none_is_named_by_file_and_line(config, refused, tmp_path):
    path = tmp_path / "conversations.jsonl"
    path.write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n{"text": "b"}\n')
    message = refused("sft", config, f"data.path={path}")
    assert message.startswith(f"{path}:2: not a conversation with `messages`")


def test_a_supervised_step_is_checked_like_a_run(config, refused, tmp_path):
    message = refused("sft", config, f"data.path={tmp_path / 'tasks.jsonl'}", "sft.batch_size=0")
    assert message == "sft.batch_size is 0; it must be at least 1"


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--engine", "scripted"], "--script FILE.jsonl goes with --engine scripted"),
        (["--script", "s.jsonl"], "--script FILE.jsonl goes with --engine scripted"),
        (["--token", "t"], "model.path is empty"),
        (["--engine", "scripted", "--script", "none.jsonl", "--token", "t"], "script 'none.jsonl' cannot be read"),
        (["--token", "t", "--model", "/nowhere"], "model.path is '/nowhere', which is no folder"),
    ],
)
def test_bad_input_of_a_gateway_alone(refused, arguments, start):
    assert refused("gateway", *arguments).startswith(start)


def test_a_script_line_that_is_none_is_named_by_file_and_line(refused, tmp_path):
    path = tmp_path / "script.jsonl"
    path.write_text('{"text": "a"}\n{"txt": "b"}\n')
    message = refused("gateway", "--engine", "scripted", "--script", path, "--token", "t")
    assert message.startswith(f"{path}:2: ")


def test_a_gateway_on_a_port_in_use(refused, tmp_path, taken_port):
    path = tmp_path / "script.jsonl"
    path.write_text('{"text": "a"}\n')
    message = refused("gateway", "--engine", "scripted", "--script", path, "--token", "t", "--port", taken_port)
    assert message.startswith(f"port {taken_port} on 127.0.0.1 is in use")


def test_a_demo_is_checked_before_its_policy_is_warmed_up(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["demo", "--out", tmp_path / "run"]
    assert refused(*arguments, "train.num_update=3").startswith("unknown key 'train.num_update'")
    assert refused(*arguments, "rollout.group_size=1").startswith("rollout.group_size is 1")
    assert not (tmp_path / "cache").exists()

"""The table of an evaluation."""

from molt.train.config import EvalConfig
from molt.train.controller.eval_metrics import Sample, summarise
from molt.train.observe.eval_table import format_evaluation
from molt.train.records.rollout import Outcome


def sample(dataset, task, reward):
    kind = "infrastructure" if reward is None else "completed"
    return Sample(task_id=task, dataset=dataset, outcome=Outcome(kind=kind, reward=reward))


def test_a_line_a_data_set_and_one_for_all():
    samples = [
        *(sample("maths", "m/0", reward) for reward in (1.0, 0.0)),
        *(sample("maths", "m/1", reward) for reward in (1.0, 1.0)),
        sample("code", "c/0", 0.0),
        sample("code", "c/0", None),
    ]
    assert format_evaluation(summarise(samples, EvalConfig(samples=2))) == "\n".join(
        [
            "data set  tasks  rollouts  missing         reward  avg@2  pass@1  pass@2",
            "code          1         1        1          0.000  0.000   0.000       -",
            "maths         2         4        0  0.750 ± 0.250  0.750   0.750   1.000",
            "all           3         5        1  0.600 ± 0.289  0.500   0.500   1.000",
        ]
    )


def test_rows_without_a_name_are_one_line():
    lines = format_evaluation(summarise([sample("", "t", 1.0)], EvalConfig())).splitlines()
    assert [line.split()[0] for line in lines] == ["data", "all"]

"""`[data]`: the tasks to train on; `[eval]`: those to evaluate on, and how."""

import msgspec

from molt.train.config.section import Section


class DatasetConfig(Section, frozen=True, kw_only=True):
    """One of several data sets, `[[data.sets]]` or `[[eval.sets]]`."""

    name: str
    """What metrics call it; task ids are prefixed with it."""
    path: str
    """JSONL, one task a line."""
    weight: float = 1.0
    """Its share of the tasks, relative to the others'. For evaluation without effect, since every row is used."""
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Only workers with all these labels (`molt-agent work --label NAME=VALUE`) are given its tasks."""


class DataConfig(Section, frozen=True, kw_only=True):
    """Task rows to train on, JSONL."""

    path: str = ""
    """One JSON object a line: the tasks to train on; for `molt-train sft`, conversations."""
    sets: tuple[DatasetConfig, ...] = ()
    """Several data sets instead of `path`."""
    shuffle: bool = True
    """Use the tasks in an order drawn from `run.seed` for each epoch, instead of the file's."""
    epochs: int = 0
    """How often each task is used; training ends when the first data set is used up. 0: as often as updates need."""


class EvalConfig(Section, frozen=True, kw_only=True):
    """Evaluation on held-out rows, never trained on."""

    path: str = ""
    """Held-out rows; empty: none, unless `sets` names some."""
    sets: tuple[DatasetConfig, ...] = ()
    """Several sets instead of `path`, reported one by one and together."""
    every: int = 0
    """Updates between evaluations. 0: only before the first and after the last update."""
    samples: int = 1
    """Rollouts of each row: the n of pass@k, and the k of avg@k."""
    threshold: float = 1.0
    """A rollout passes with a score (else reward) of at least this."""
    max_tokens: int = 0
    """Most tokens of one model call. 0: rollout.max_tokens."""
    temperature: float | None = None
    """None: rollout.temperature. 0: greedy."""
    top_p: float | None = None
    """None: rollout.top_p."""
    pinned: bool = True
    """Keep the policy as it is while it is evaluated. False: training goes on, and an evaluation may span versions."""
    keep_best: bool = False
    """Keep the checkpoint with the best evaluation so far besides the newest ones, as `checkpoints/best`."""

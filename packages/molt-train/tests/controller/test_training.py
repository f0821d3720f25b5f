"""The training loop on a real pool and ledger; actor, engines and workers do what each test says."""

import asyncio
import contextlib
import gc
import json
import weakref

import pytest

from molt.train.config import AlgorithmConfig, Config, DataConfig, EvalConfig, RolloutConfig, TrainConfig
from molt.train.controller import training
from molt.train.controller.admission import Admission
from molt.train.controller.checkpoints import Checkpoints
from molt.train.controller.collect import Collector
from molt.train.controller.evaluation import Evaluation
from molt.train.controller.learning import Learning
from molt.train.controller.serving import Serving
from molt.train.controller.training import Parts, TrainingLoop
from molt.train.engine.router import Router
from molt.train.errors import ActorDeadError, ActorError, PayloadLostError, RunError, StallError
from molt.train.observe.journal import Journal, read_journal
from molt.train.pool.tasks import Dataset
from molt.train.records.refit import RefitReport
from molt.train.records.rollout import Task
from molt.train.records.window import StepReport
from molt.train.window import plan_of


class Fleet:
    """One engine, which a restart replaces."""

    def __init__(self):
        self.engines, self.actors = [object()], ["handle"]
        self.stopped = []

    async def fault(self, index):
        return None

    def stop(self, index, reason):
        self.stopped.append(reason)

    async def restart(self, index):
        self.engines[index] = object()


class Actor:
    """Keeps the windows that it is given, and the ledger's state when it was given them."""

    def __init__(self, pool):
        self.pool = pool
        self.windows = []
        self.recorded = []
        """Of each update: the window that the ledger had for it before it was made."""
        self.served = []
        self.saved = []
        self.fails_in = None
        """The update that the ranks refuse to make."""
        self.deaths = []
        """Where the ranks die, once each: the name of a call, and the update that it is for."""
        self.restarts_left = 2
        self.causes = []
        self.made = 0
        """Updates in the weights: what a restart loses."""

    def _die(self, call, step):
        if (call, step) in self.deaths:
            self.deaths.remove((call, step))
            raise ActorDeadError(f"a rank died in {call}")

    async def train(self, windows, *, kl_coef):
        await asyncio.sleep(0)
        step = windows[0].step
        self.recorded += [window for window in self.pool.ledger.windows() if window.step == step]
        if step == self.fails_in:
            raise ActorError(f"update {step}: the loss is nan")
        self._die("train", step)
        assert step == self.made + 1, "the weights are those of another update"
        self.made = step
        self.windows.append(windows)
        return StepReport(
            step=step,
            loss=0.5,
            grad_norm=2.0,
            lr=1e-3,
            logprob_gap_mean=0.0,
            logprob_gap_max=0.0,
            metrics={"clip_fraction": 0.125},
        )

    async def save(self, folder, *, step, progress):
        self._die("save", step)
        folder.mkdir(parents=True)
        (folder / "state").write_text(json.dumps([step, progress]))
        self.saved.append(step)

    async def load(self, folder):
        self.made, progress = json.loads((folder / "state").read_text())
        return self.made, progress

    async def restart(self, cause):
        self.causes.append(str(cause))
        if not self.restarts_left:
            raise RunError(f"{cause} (actor.max_restarts is spent)")
        self.restarts_left -= 1
        self.made = 0

    async def check_health(self):
        self._die("check_health", self.made)

    async def connect(self, engines, *, workers_per_engine):
        pass

    async def refit(self, at_least):
        self._die("refit", self.made)
        assert self.made >= at_least, "the engines would be given weights of an older version"
        self.served.append(self.made)
        return RefitReport(version=self.made)

    @property
    def steps(self):
        return [windows[0].step for windows in self.windows]

    @property
    def groups(self):
        """The ids of the groups trained on, an update each."""
        return [
            {row.experience.group_id for window in windows for rank in window.ranks for mb in rank for row in mb.rows}
            for windows in self.windows
        ]


class Memory:
    async def after_window(self):
        pass


class Stall:
    def __init__(self, *, patient=True):
        self._patient = patient

    def check(self, waiting_for):
        if not self._patient:
            raise StallError(f"waiting for {waiting_for}")


class Run:
    """One process's life: the loop with everything that it works with, on the run folder of the test."""

    def __init__(self, config, pool, folder, *, stall=None, evaluate=False):
        self.pool, self.folder = pool, folder
        self.actor = Actor(pool)
        self.rows = []
        self.journal = Journal(folder / "metrics.jsonl")
        self.evaluations = Journal(folder / "evaluations.jsonl")
        self.admission = Admission(
            config, pool, [Dataset(tasks=[Task(task_id=f"t{i}", data={"q": i}) for i in range(3)])]
        )
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=config.train.keep_checkpoints)
        self.fleet = Fleet()
        self.serving = Serving(
            self.fleet, Router(), self.actor, workers_per_engine=1, on_event=lambda kind, detail: None
        )
        stall = stall or Stall()
        held_out = [Task(task_id="held-out", data={"q": -1})]
        evaluation = Evaluation(pool, held_out, settings=config.eval, journal=self.evaluations, stall=stall)
        learning = Learning(config, self.actor, plan_of(config, hidden_size=64))
        self.loop = TrainingLoop(
            config,
            Parts(
                pool=pool,
                actor=self.actor,
                learning=learning,
                serving=self.serving,
                admission=self.admission,
                collector=Collector(config, pool, self.admission, learning, stall),
                checkpoints=self.checkpoints,
                journal=self.journal,
                stall=stall,
                evaluation=evaluation if evaluate else None,
                memory=Memory(),
                on_update=[self.rows.append],
            ),
        )

    @property
    def written(self):
        return read_journal(self.journal.path)


@pytest.fixture
def make_run(restart_pool, tmp_path):
    def make(config, **options):
        return Run(config, restart_pool(), tmp_path / "run", **options)

    return make


@pytest.fixture
def live(make_workers):
    """Resume and run to the end, with workers that sample on the version being served, or as `outcome_of` says."""

    async def play(run, outcome_of=None):
        def on_policy(assignment):
            member = int(assignment.rollout_id.rpartition(".")[2])
            return {"version": run.serving.version, "reward": float(member % 2)}

        await run.loop.resume()
        run.evaluations.truncate_after(run.loop.step)
        serving = asyncio.create_task(make_workers(run.pool).serve(outcome_of or on_policy))
        try:
            await run.loop.run()
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving  # raises what a worker raised
            run.journal.close()
            run.evaluations.close()

    return play


def configure(*, estimator="grpo", eval_every=0, epochs=0, **train):
    train = {"num_updates": 3, "groups_per_update": 2, "max_staleness": 1, "checkpoint_every": 0, **train}
    return Config(
        train=TrainConfig(**train),
        rollout=RolloutConfig(group_size=2),
        algorithm=AlgorithmConfig(estimator=estimator),
        eval=EvalConfig(every=eval_every, path="held_out.jsonl", samples=2),
        data=DataConfig(epochs=epochs),
    )


async def test_every_update_trains_a_window_of_complete_groups_and_gives_one_policy_version(make_run, live):
    run = make_run(configure())
    await live(run)
    assert run.actor.steps == [1, 2, 3]
    assert run.actor.served == [1, 2, 3]
    assert run.serving.version == run.loop.step == 3
    assert [len(groups) for groups in run.actor.groups] == [2, 2, 2]
    assert len(set.union(*run.actor.groups)) == 6, "no group is trained on twice"
    assert [windows[0].policy_version for windows in run.actor.windows] == [0, 1, 2]


async def test_a_window_is_in_the_ledger_before_it_is_trained(make_run, live):
    run = make_run(configure())
    await live(run)
    assert [(window.step, window.policy_version) for window in run.actor.recorded] == [(1, 0), (2, 1), (3, 2)]
    assert [set(window.group_ids) for window in run.actor.recorded] == run.actor.groups


async def test_no_more_groups_are_opened_than_are_trained(make_run, live):
    run = make_run(configure(max_staleness=2))
    await live(run)
    assert [group.state for group in run.pool.ledger.groups()] == ["consumed"] * 6
    assert run.admission.updates_left == 0


async def test_the_journal_has_a_row_an_update_with_what_the_window_held(make_run, live):
    run = make_run(configure())
    await live(run)
    assert run.written == run.rows
    assert [(row["step"], row["policy_version"]) for row in run.rows] == [(1, 0), (2, 1), (3, 2)]
    first = run.rows[0]
    expected = {
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "num_rollouts": 4,
        "num_segments": 4,
        "num_action_tokens": 8,
        "loss": 0.5,
        "grad_norm": 2.0,
        "lr": 1e-3,
        "logprob_gap_mean": 0.0,
        "logprob_gap_max": 0.0,
        "clip_fraction": 0.125,
        "staleness_mean": 0.0,
        "staleness_max": 0,
        "delivered_fraction": 1.0,
        "dropped": {},
        "info_mean": {},
    }
    assert {key: first[key] for key in expected} == expected
    assert {"wait_rollouts", "train", "refit", "total"} <= first["timing"].keys()
    parts = [seconds for name, seconds in first["timing"].items() if name != "total"]
    assert first["timing"]["total"] == pytest.approx(sum(parts))


async def test_a_group_that_fell_behind_the_bound_is_dropped_and_counted(make_run, live):
    run = make_run(configure(num_updates=4, groups_per_update=1, max_staleness=1))
    late = "g3"  # its rollouts are of version 0, and the third update may train version 1 and 2

    def outcome_of(assignment):
        return {"version": 0 if assignment.group_id == late else run.serving.version}

    await live(run, outcome_of)
    group = run.pool.ledger.group(late)
    assert (group.state, group.reason) == ("dropped", "stale")
    assert all(late not in groups for groups in run.actor.groups)
    assert run.actor.steps == [1, 2, 3, 4]
    assert [row["dropped"] for row in run.rows] == [{}, {}, {"groups_stale": 1}, {}]


async def test_a_group_as_old_as_the_bound_is_trained(make_run, live):
    run = make_run(configure(num_updates=2, groups_per_update=1, max_staleness=1))
    await live(run, lambda assignment: {"version": 0})
    assert run.actor.groups == [{"g1"}, {"g2"}]
    assert run.rows[1]["staleness_max"] == 1


async def test_a_group_without_two_rollouts_to_compare_is_dropped_and_another_takes_its_place(make_run, live):
    run = make_run(configure(num_updates=1))

    def outcome_of(assignment):
        fails = assignment.group_id == "g1" and assignment.rollout_id.endswith(".0")
        return {"kind": "failed" if fails else "completed"}

    await live(run, outcome_of)
    assert (run.pool.ledger.group("g1").state, run.pool.ledger.group("g1").reason) == ("dropped", "no_usable_rollouts")
    assert run.actor.groups == [{"g2", "g3"}]
    assert run.rows[0]["dropped"] == {"groups_no_usable_rollouts": 1}


async def test_a_failed_rollout_of_a_group_that_is_kept_is_counted(make_run, live):
    run = make_run(configure(num_updates=1, groups_per_update=1, estimator="reinforce_pp"))

    def outcome_of(assignment):
        return {"kind": "failed" if assignment.rollout_id.endswith(".0") else "completed"}

    await live(run, outcome_of)
    assert run.rows[0]["dropped"] == {"rollouts_failed": 1}
    assert run.rows[0]["num_rollouts"] == 1


async def test_the_loop_waits_for_what_the_window_still_lacks_under_a_guard(make_run, live):
    run = make_run(configure(), stall=Stall(patient=False))
    with pytest.raises(StallError, match="waiting for 1 more complete groups"):
        await live(run, lambda assignment: {} if assignment.group_id == "g1" else None)


@pytest.mark.parametrize(
    ("every", "saved", "kept"), [(2, [2, 4, 5], [4, 5]), (0, [5], [5]), (1, [1, 2, 3, 4, 5], [4, 5])]
)
async def test_checkpoints_are_made_at_their_interval_and_after_the_last_update(make_run, live, every, saved, kept):
    run = make_run(configure(num_updates=5, checkpoint_every=every, keep_checkpoints=2))
    await live(run)
    assert run.actor.saved == saved
    assert run.checkpoints.steps() == kept


async def test_a_resumed_run_trains_the_recorded_windows_again_and_goes_on(make_run, live):
    config = configure(num_updates=5, checkpoint_every=2)
    first = make_run(config)
    first.actor.fails_in = 4
    with pytest.raises(ActorError):
        await live(first)
    assert first.actor.steps == [1, 2, 3]
    (lost,) = [window for window in first.actor.recorded if window.step == 4]

    second = make_run(config)
    await live(second)
    assert second.actor.served == [4, 5], "the engines are given what comes out of the recorded windows first"
    assert second.actor.steps == [3, 4, 5]
    assert second.actor.groups[0] == first.actor.groups[2]
    assert second.actor.groups[1] == set(lost.group_ids)
    assert [row["step"] for row in second.written] == [1, 2, 3, 4, 5]
    windows = second.pool.ledger.windows()
    consumed = [group_id for window in windows for group_id in window.group_ids]
    assert len(consumed) == len(set(consumed)) == 10, "every group is consumed once"


async def test_a_resumed_run_trains_again_exactly_the_same_rows(make_run, live):
    config = configure(num_updates=3, checkpoint_every=1)
    first = make_run(config)
    first.actor.fails_in = 3
    with pytest.raises(ActorError):
        await live(first)
    second = make_run(config)
    seen = {}
    original = second.actor.train

    async def look(windows, *, kl_coef):
        seen[windows[0].step] = windows
        return await original(windows, kl_coef=kl_coef)

    second.actor.train = look
    await live(second)
    rows = [row for window in seen[3] for rank in window.ranks for microbatch in rank for row in microbatch.rows]
    assert [row.experience.payload.token_ids.tolist() for row in rows] == [[5, 6, 7, 8]] * 4
    assert [row.experience.payload.logprobs.tolist() for row in rows] == [[0.0, 0.0, -0.5, -0.25]] * 4
    assert {row.experience.rollout_id for row in rows} == {
        f"{group_id}.{member}" for group_id in first.actor.recorded[-1].group_ids for member in (0, 1)
    }


async def test_a_run_that_died_before_its_first_checkpoint_starts_over_on_its_recorded_windows(make_run, live):
    config = configure(num_updates=3)
    first = make_run(config)
    first.actor.fails_in = 2
    with pytest.raises(ActorError):
        await live(first)
    second = make_run(config)
    await live(second)
    assert second.actor.served == [2, 3]
    assert second.actor.groups[:2] == [set(window.group_ids) for window in first.actor.recorded]
    assert [row["step"] for row in second.written] == [1, 2, 3]


async def test_a_finished_run_has_nothing_left_to_do(make_run, live):
    config = configure(num_updates=2)
    await live(make_run(config))
    again = make_run(config)
    await live(again)
    assert again.actor.windows == []
    assert [row["step"] for row in again.written] == [1, 2]


@pytest.mark.parametrize(("every", "steps"), [(0, [0, 5]), (2, [0, 2, 4, 5])])
async def test_evaluations_come_before_the_first_and_after_the_last_update_and_at_their_interval(
    make_run, live, every, steps
):
    run = make_run(configure(num_updates=5, eval_every=every), evaluate=True)
    await live(run)
    rows = read_journal(run.evaluations.path)
    assert [row["step"] for row in rows] == steps
    assert [row["policy_version"] for row in rows] == steps
    assert {row["num_rollouts"] for row in rows} == {2}


async def test_a_resumed_run_is_not_evaluated_on_its_first_weights_again(make_run, live):
    config = configure(num_updates=4, checkpoint_every=2)
    first = make_run(config, evaluate=True)
    first.actor.fails_in = 3
    with pytest.raises(ActorError):
        await live(first)
    second = make_run(config, evaluate=True)
    await live(second)
    assert [row["step"] for row in read_journal(second.evaluations.path)] == [0, 4]


async def test_an_evaluation_that_a_crash_cut_short_is_made_by_the_resumed_run(make_run, live):
    config = configure(num_updates=2)
    first = make_run(config, evaluate=True, stall=Stall(patient=False))

    def vanish(assignment):
        version = first.serving.version
        return None if assignment.kind == "eval" and version == 2 else {"version": version}

    with pytest.raises(StallError, match="evaluation rollouts"):
        await live(first, vanish)
    second = make_run(config, evaluate=True)
    await live(second)
    assert second.actor.windows == []
    assert [row["step"] for row in read_journal(second.evaluations.path)] == [0, 2]


async def test_no_evaluation_is_made_twice(make_run, live):
    config = configure(num_updates=2, eval_every=1, checkpoint_every=1)
    await live(make_run(config, evaluate=True))
    again = make_run(config, evaluate=True)
    await live(again)
    assert [row["step"] for row in read_journal(again.evaluations.path)] == [0, 1, 2]


async def test_no_train_group_is_opened_during_an_evaluation(make_run, live):
    run = make_run(configure(num_updates=2, eval_every=1), evaluate=True)
    paused = {"train": set(), "eval": set()}

    def outcome_of(assignment):
        paused[assignment.kind].add(run.admission.paused)
        return {"version": run.serving.version}

    await live(run, outcome_of)
    assert paused["eval"] == {True}
    assert False in paused["train"]


# Ranks that die.


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize(
    "deaths",
    [
        [("train", 1)],
        [("train", 3)],
        [("refit", 1)],
        [("refit", 4)],
        [("save", 4)],
        [("train", 3), ("train", 3)],
        [("refit", 3), ("refit", 3)],
        [("train", 2), ("save", 4)],
        [("train", 4), ("refit", 3)],
    ],
    ids=str,
)
async def test_wherever_ranks_die_the_updates_come_out_as_without_it(make_run, live, deaths, every):
    run = make_run(configure(num_updates=4, checkpoint_every=every))
    run.actor.deaths = list(deaths)
    await live(run)
    assert run.actor.deaths == [], "a death did not come about"
    assert len(run.actor.causes) == len(deaths)
    windows = {window.step: set(window.group_ids) for window in run.pool.ledger.windows()}
    assert all(groups == windows[step] for step, groups in zip(run.actor.steps, run.actor.groups, strict=True))
    assert [row["step"] for row in run.written] == [1, 2, 3, 4], "rows of updates that are made again replace the old"
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4], "nobody is told of an update twice"
    assert run.actor.served == sorted(run.actor.served), "policy versions never go back"
    assert run.actor.served[-1] == run.actor.made == run.serving.version == run.loop.step == 4
    assert run.checkpoints.latest()[0] == 4
    assert {group.state for group in run.pool.ledger.groups()} == {"consumed"}


async def test_new_ranks_go_on_from_the_newest_checkpoint_and_the_engines_get_their_version_again(make_run, live):
    run = make_run(configure(num_updates=4, checkpoint_every=2))
    run.actor.deaths = [("train", 4)]
    await live(run)
    assert run.actor.steps == [1, 2, 3, 3, 4]
    assert run.actor.groups[2] == run.actor.groups[3]
    assert run.actor.served == [1, 2, 3, 3, 4]
    assert run.fleet.stopped == [], "engines serve on while the actor is started anew"


async def test_engines_that_a_dying_rank_may_have_left_with_a_mixture_never_serve_again(make_run, live):
    run = make_run(configure(num_updates=2))
    before = run.fleet.engines[0]
    run.actor.deaths = [("refit", 2)]
    supervision = asyncio.create_task(run.serving.supervise())
    await live(run)
    supervision.cancel()
    assert run.fleet.stopped == ["a refit failed"]
    assert run.fleet.engines[0] is not before
    assert run.actor.served == [1, 2]


async def test_ranks_that_die_while_nothing_is_asked_of_them_are_replaced_meanwhile(make_run, live, monkeypatch):
    monkeypatch.setattr(training, "HEALTH_INTERVAL_S", 0.0)
    run = make_run(configure(num_updates=2))
    run.actor.deaths = [("check_health", 1)]
    watcher = asyncio.create_task(run.loop.watch_actor())
    await live(run)
    watcher.cancel()
    assert run.actor.causes == ["a rank died in check_health"]
    assert [row["step"] for row in run.written] == [1, 2]
    assert run.actor.made == 2


async def test_when_the_restarts_are_spent_the_run_ends(make_run, live):
    run = make_run(configure())
    run.actor.restarts_left = 1
    run.actor.deaths = [("train", 2), ("train", 2)]
    with pytest.raises(RunError, match=r"a rank died in train \(actor.max_restarts is spent\)"):
        await live(run)


async def test_what_ranks_refuse_is_not_tried_again(make_run, live):
    run = make_run(configure())
    run.actor.fails_in = 2
    with pytest.raises(ActorError, match="update 2: the loss is nan"):
        await live(run)
    assert run.actor.causes == []


async def test_the_row_of_an_update_that_is_made_again_keeps_what_only_the_old_one_knew(make_run, live):
    config = configure(num_updates=2)

    def outcome_of(assignment):
        fails = assignment.group_id == "g1" and assignment.rollout_id.endswith(".0")
        return {"kind": "failed" if fails else "completed", "version": 0}

    run = make_run(config)
    run.actor.deaths = [("train", 2)]
    await live(run, outcome_of)
    assert [row["dropped"] for row in run.written] == [{"groups_no_usable_rollouts": 1}, {}]


async def test_groups_whose_payloads_are_gone_come_from_the_ledger_again(make_run, live):
    run = make_run(configure(num_updates=2))
    original, lost = run.actor.train, []

    async def train(windows, *, kl_coef):
        if windows[0].step == 2 and not lost:
            lost.append(windows)
            raise PayloadLostError("a payload is gone from the object store")
        return await original(windows, kl_coef=kl_coef)

    run.actor.train = train
    await live(run)
    assert len(lost) == 1
    assert run.actor.groups[1] == set(run.pool.ledger.windows()[1].group_ids)
    assert [row["num_rollouts"] for row in run.written] == [4, 4]


# The end of the data, and what a resume keeps.


async def test_the_payloads_of_a_window_are_let_go_of_while_the_next_one_fills(make_run, live, monkeypatch):
    run, trained, alive = make_run(configure()), [], []
    train, collect = run.actor.train, run.loop._parts.collector.collect

    async def watch_train(windows, *, kl_coef):
        report = await train(windows, kl_coef=kl_coef)
        rows = [row for window in windows for rank in window.ranks for part in rank for row in part.rows]
        trained.extend(weakref.ref(row.experience.payload.token_ids) for row in rows)
        run.actor.windows.clear()  # this stand-in keeps them; ranks do not
        return report

    async def watch_collect(step):
        groups = await collect(step)
        gc.collect()
        alive.append(sum(ref() is not None for ref in trained))
        return groups

    monkeypatch.setattr(run.actor, "train", watch_train)
    monkeypatch.setattr(run.loop._parts.collector, "collect", watch_collect)
    await live(run)
    assert len(trained) == 12
    assert alive == [0, 0, 0]


async def test_training_ends_cleanly_when_the_data_is_used_up(make_run, live, caplog):
    run = make_run(configure(num_updates=10, epochs=2, groups_per_update=3), evaluate=True)
    with caplog.at_level("INFO"):
        await live(run)
    assert run.actor.steps == [1, 2], "2 epochs of 3 tasks"
    assert run.checkpoints.steps() == [2]
    assert [row["step"] for row in read_journal(run.evaluations.path)] == [0, 2]
    assert "training ends after update 2 of 10: data.epochs 2 are used up" in caplog.text


async def test_a_resume_keeps_finished_groups_that_were_not_trained_and_the_data_position(make_run, live):
    config = configure(num_updates=4, max_staleness=3, checkpoint_every=1)
    first = make_run(config)
    first.actor.fails_in = 2
    with pytest.raises(ActorError):
        await live(first)
    ledger = first.pool.ledger
    groups = {group.group_id: group for group in ledger.groups()}
    untrained = {group_id for group_id, group in groups.items() if group.state == "complete"}
    assert untrained, "nothing was finished ahead; the test shows nothing"

    second = make_run(config)
    await live(second)
    consumed = {group_id for window in second.pool.ledger.windows() for group_id in window.group_ids}
    assert untrained <= consumed
    after = list(second.pool.ledger.groups())
    positions = [group.position for group in after]
    assert positions == list(range(len(after))), "no position of the data is used twice, or passed over"
    assert {group_id: (groups[group_id].task, groups[group_id].position) for group_id in groups} == {
        group.group_id: (group.task, group.position) for group in after if group.group_id in groups
    }

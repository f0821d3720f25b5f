"""Evaluations on the way of a run: pinned or beside training, made up for after a restart, and the best checkpoint."""
# ruff: noqa: TID252 - the folders of tests are no installed package; the fixtures are those of the loop's tests

from collections import Counter

import msgspec

from molt.train.observe.journal import read_journal

from .test_training import Run, configure, live, make_run

__all__ = ["live", "make_run"]


def evaluated(config, **settings):
    return msgspec.structs.replace(config, eval=msgspec.structs.replace(config.eval, **settings))


def rows_of(run):
    return read_journal(run.evaluations.path)


def graded_by_version(run: Run, rewards):
    """Rewards of evaluation rollouts by the version that serves; train rollouts have 0 and 1 in turn."""

    def outcome_of(assignment):
        version = run.serving.version
        reward = rewards[version] if assignment.kind == "eval" else float(assignment.member % 2)
        return {"version": version, "reward": reward}

    return outcome_of


async def test_the_checkpoint_of_the_best_evaluation_stays(make_run, live):
    config = evaluated(configure(num_updates=5, keep_checkpoints=1), every=1, keep_best=True)
    run = make_run(config, evaluate=True)
    await live(run, graded_by_version(run, {0: 0.9, 1: 0.25, 2: 0.75, 3: 0.5, 4: 0.75, 5: 0.5}))
    assert [row["reward_mean"] for row in rows_of(run)] == [0.9, 0.25, 0.75, 0.5, 0.75, 0.5]
    assert (run.checkpoints.best, run.checkpoints.steps()) == (2, [2, 5])


async def test_the_best_evaluation_is_known_to_the_process_that_goes_on(make_run, live):
    config = evaluated(configure(num_updates=3, keep_checkpoints=1), every=1, keep_best=True)
    first = make_run(config, evaluate=True)
    await live(first, graded_by_version(first, {0: 0.0, 1: 0.75, 2: 0.5, 3: 0.25}))
    assert first.checkpoints.best == 1
    longer = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, num_updates=5))
    second = make_run(longer, evaluate=True)
    await live(second, graded_by_version(second, {4: 0.5, 5: 0.875}))
    assert [row["step"] for row in rows_of(second)] == [0, 1, 2, 3, 4, 5]
    assert (second.checkpoints.best, second.checkpoints.steps()) == (5, [5])


async def test_without_the_option_no_checkpoint_is_marked(make_run, live):
    run = make_run(evaluated(configure(), every=1), evaluate=True)
    await live(run)
    assert (run.checkpoints.best, run.checkpoints.steps()) == (None, [3])


async def test_an_evaluation_that_a_stop_prevented_is_made_up_for(make_run, live):
    first = make_run(configure(num_updates=2))
    await live(first)
    second = make_run(evaluated(configure(num_updates=4), every=2), evaluate=True)
    await live(second)
    assert [row["step"] for row in rows_of(second)] == [2, 4]


async def test_a_pinned_one_holds_training_up(make_run, live):
    run = make_run(evaluated(configure(num_updates=4), every=2), evaluate=True)
    await live(run)
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert all(row["oldest_version"] == row["newest_version"] == row["step"] for row in rows)


async def test_beside_training_it_ends_at_a_later_version_and_those_due_meanwhile_are_counted(
    make_run, live, make_workers
):
    run = make_run(evaluated(configure(num_updates=6), every=1, pinned=False), evaluate=True)
    workers, held = make_workers(run.pool), []

    def outcome_of(assignment):
        version = run.serving.version
        if version < 2:  # evaluation rollouts take their time
            if assignment.kind == "eval":
                held.append(assignment)
                return None
        else:
            for waiting in held:
                workers.report(waiting, version=version)
            held.clear()
        return {"version": version, "reward": float(assignment.member % 2)}

    await live(run, outcome_of)
    rows = rows_of(run)
    assert run.actor.steps == [1, 2, 3, 4, 5, 6]
    assert (rows[0]["step"], rows[0]["policy_version"]) == (0, 0)
    assert rows[0]["newest_version"] >= 2, "training waited for it"
    assert rows[0]["num_skipped"] >= 2  # those after updates 1 and 2
    assert len(rows) + sum(row["num_skipped"] for row in rows) == 7  # due before, and after each of six
    assert (rows[-1]["step"], rows[-1]["oldest_version"], rows[-1]["newest_version"]) == (6, 6, 6)
    kinds = Counter((group.kind, group.state) for group in run.pool.ledger.groups())
    assert kinds == {("train", "consumed"): 12, ("eval", "consumed"): len(rows)}

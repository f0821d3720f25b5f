"""Turn trees to segments: rows are context-exact, tokens are trained once, and nothing disappears uncounted."""

from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.train.config import AlgorithmConfig, Config, RolloutConfig
from molt.train.records.turn import Turn
from molt.train.trajectory import TrainingRules, build_trajectory, delivered_fraction


class Tree:
    """Grows a turn tree with tokens that occur once, and keeps the prompt of each turn as the engine saw it."""

    def __init__(self):
        self.turns: list[Turn] = []
        self.prompts: dict[str, list[int]] = {}
        self.rows: dict[str | None, list[int]] = {None: []}
        self._token = count(100)

    def add(self, turn_id, parent=None, *, context=2, sampled=3, version=0, **changes):
        context_ids = [next(self._token) for _ in range(context)]
        token_ids = [next(self._token) for _ in range(sampled)]
        self.prompts[turn_id] = self.rows[parent] + context_ids
        self.rows[turn_id] = self.prompts[turn_id] + token_ids
        fields = {
            "turn_id": turn_id,
            "session_id": "s",
            "wire": "chat",
            "parent_turn_id": parent,
            "opened_by": "start" if parent is None else None,
            "response_id": f"resp-{turn_id}",
            "status": "delivered",
            "adopted": True,
            "auxiliary": False,
            "finish_reason": "stop",
            "prompt_length": len(self.prompts[turn_id]),
            "context_ids": context_ids,
            "token_ids": token_ids,
            "logprobs": [-float(t) for t in token_ids],
            "versions": [version] * sampled,
        }
        self.turns.append(Turn(**(fields | changes)))
        return self

    def build(self, **rules):
        return build_trajectory("s", self.turns, TrainingRules(**rules))


def actions(segment):
    return [t for t, m in zip(segment.token_ids, segment.action_mask, strict=True) if m]


def test_a_linear_session_is_one_row_with_everything_aligned():
    tree = Tree().add("a", context=2, sampled=2, version=4).add("b", "a", context=1, sampled=1, version=5)
    (segment,) = tree.build().segments
    assert segment.segment_id == "s/0"
    assert segment.turn_ids == ["a", "b"]
    assert segment.opened_by == "start"
    assert segment.token_ids == [100, 101, 102, 103, 104, 105]
    assert segment.action_mask == [0, 0, 1, 1, 0, 1]
    assert segment.logprobs == [0.0, 0.0, -102.0, -103.0, 0.0, -105.0]
    assert segment.versions == [None, None, 4, 4, None, 5]
    assert segment.trained
    assert segment.untrained_reason is None


def test_a_turn_under_two_leaves_is_trained_in_the_first_and_is_context_in_the_second():
    tree = Tree().add("a").add("b", "a").add("c", "a")
    trajectory = tree.build()
    first, second = trajectory.segments
    assert (first.turn_ids, second.turn_ids) == (["a", "b"], ["a", "c"])
    assert first.action_mask == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert second.action_mask == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert second.token_ids[:5] == first.token_ids[:5]
    assert second.versions[:5] == first.versions[:5]
    assert trajectory.counters == {"turns": 3, "segments": 2, "forks": 1, "opened_by.start": 1, "shared_tokens": 3}


def test_a_rejected_sibling_leaves_the_shared_turns_to_the_one_that_was_adopted():
    tree = Tree().add("a").add("rejected", "a", adopted=False).add("chosen", "a")
    rejected, chosen = tree.build().segments
    assert rejected.turn_ids == ["a", "rejected"]
    assert not any(rejected.action_mask)
    assert (rejected.trained, rejected.untrained_reason) == (False, "not_adopted")
    assert chosen.trained
    assert actions(chosen) == tree.turns[0].token_ids + tree.turns[2].token_ids


def test_turns_before_an_aborted_last_one_are_still_trained():
    tree = Tree().add("a").add("cut", "a", status="aborted")
    trajectory = tree.build()
    (segment,) = trajectory.segments
    assert segment.trained
    assert actions(segment) == tree.turns[0].token_ids
    assert segment.token_ids == tree.rows["cut"]
    assert trajectory.counters["untrained_turns.aborted"] == 1
    assert trajectory.counters["untrained_tokens.aborted"] == 3


def test_a_turn_sampled_off_policy_is_context_of_the_turns_behind_it():
    tree = Tree().add("a", off_policy=["grammar"]).add("b", "a")
    trajectory = tree.build()
    (segment,) = trajectory.segments
    assert segment.trained
    assert actions(segment) == tree.turns[1].token_ids
    assert segment.token_ids == tree.rows["b"]
    assert trajectory.counters["untrained_turns.off_policy"] == 1
    assert trajectory.counters["untrained_tokens.off_policy"] == 3


def test_off_policy_turns_and_side_calls_are_trained_where_the_rules_say_so():
    tree = Tree().add("a", off_policy=["top_p"]).add("side", auxiliary=True, opened_by="system_changed")
    assert [segment.trained for segment in tree.build().segments] == [False, False]
    assert [segment.trained for segment in tree.build(off_policy=True).segments] == [True, False]
    assert [segment.trained for segment in tree.build(auxiliary=True).segments] == [False, True]
    both = tree.build(auxiliary=True, off_policy=True)
    assert not [name for name in both.counters if name.startswith("untrained")]


def test_another_temperature_is_off_policy_only_for_a_loss_that_does_not_weigh_it():
    tree = Tree().add("a", sampling={"temperature": 0.5}).add("b", opened_by="new", sampling={"temperature": 1.0})
    assert [segment.trained for segment in tree.build().segments] == [True, True]
    segments = tree.build(temperature=1.0).segments
    assert [segment.untrained_reason for segment in segments] == ["off_policy", None]
    assert tree.build(temperature=1.0, off_policy=True).segments[0].trained


def test_the_rules_are_those_of_the_configuration():
    assert TrainingRules.of(Config()) == TrainingRules()
    rollout = RolloutConfig(train_off_policy=True, train_auxiliary=True, temperature=0.7)
    config = Config(rollout=rollout, algorithm=AlgorithmConfig(correction="none"))
    assert TrainingRules.of(config) == TrainingRules(off_policy=True, auxiliary=True, temperature=0.7)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auxiliary": True}, "auxiliary"),
        ({"auxiliary": True, "status": "failed"}, "auxiliary"),
        ({"status": "failed"}, "failed"),
        ({"status": "aborted"}, "aborted"),
        ({"status": "undelivered"}, "undelivered"),
        ({"status": "undelivered", "adopted": False}, "undelivered"),
        ({"adopted": False}, "not_adopted"),
        ({"off_policy": ["top_k"]}, "off_policy"),
        ({"off_policy": ["grammar"], "adopted": False}, "not_adopted"),
    ],
)
def test_what_is_not_trained_is_present_with_its_reason_and_counted(changes, reason):
    tree = Tree().add("main").add("side", opened_by="system_changed", **changes)
    trajectory = tree.build()
    main, side = trajectory.segments
    assert main.trained
    assert (side.trained, side.untrained_reason, side.opened_by) == (False, reason, "system_changed")
    assert side.action_mask == [0] * 5
    assert side.token_ids == tree.rows["side"]
    assert side.logprobs[2:] == tree.turns[1].logprobs
    assert trajectory.counters[f"untrained_turns.{reason}"] == 1
    assert trajectory.counters[f"untrained_tokens.{reason}"] == 3
    assert trajectory.counters["opened_by.system_changed"] == 1


def test_a_row_in_which_nothing_was_sampled_says_no_actions():
    (segment,) = Tree().add("a", sampled=0).build().segments
    assert (segment.trained, segment.untrained_reason) == (False, "no_actions")


def test_a_leaf_that_adds_nothing_to_a_row_trained_elsewhere_says_no_actions():
    tree = Tree().add("a").add("b", "a").add("silent", "a", sampled=0)
    assert [s.untrained_reason for s in tree.build().segments] == [None, "no_actions"]


def test_rewritten_history_opens_a_segment_of_its_own():
    tree = Tree().add("a").add("b", "a").add("compacted", opened_by="history_rewritten").add("d", "compacted")
    trajectory = tree.build()
    assert [s.opened_by for s in trajectory.segments] == ["start", "history_rewritten"]
    assert [s.segment_id for s in trajectory.segments] == ["s/0", "s/1"]
    assert trajectory.counters["opened_by.history_rewritten"] == 1
    assert "forks" not in trajectory.counters


def test_an_empty_session_is_an_empty_trajectory():
    trajectory = build_trajectory("s", [])
    assert (trajectory.session_id, trajectory.segments, trajectory.counters) == ("s", [], {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [0.0]}, r"turn 'b': token_ids, logprobs and versions have lengths \(3, 1, 3\)"),
        ({"versions": []}, r"turn 'b': token_ids, logprobs and versions have lengths \(3, 3, 0\)"),
        ({"prompt_length": 8}, r"turn 'b': prompt_length is 8, but its parent's row has 5 tokens"),
        ({"parent_turn_id": "x"}, r"turn 'b': its parent 'x' is not among the turns before it"),
        ({"turn_id": "a"}, r"turn 'a' is recorded twice"),
        ({"parent_turn_id": None}, r"turn 'b' has no parent and no opened_by"),
    ],
)
def test_a_turn_that_contradicts_itself_is_named(changes, message):
    tree = Tree().add("a").add("b", "a")
    tree.turns[1] = msgspec.structs.replace(tree.turns[1], **changes)
    with pytest.raises(ValueError, match=message):
        tree.build()


def test_a_child_recorded_before_its_parent_is_named():
    tree = Tree().add("a").add("b", "a")
    with pytest.raises(ValueError, match="turn 'b': its parent 'a' is not among the turns before it"):
        build_trajectory("s", tree.turns[::-1])


def test_delivered_fraction_counts_sampled_tokens():
    tree = Tree().add("a", context=50, sampled=3).add("b", "a", sampled=1, status="undelivered")
    tree.add("c", "a", sampled=4, status="failed")
    assert delivered_fraction(tree.turns) == 3 / 8
    assert delivered_fraction([]) == 1.0
    assert delivered_fraction(Tree().add("a", sampled=0, status="failed").turns) == 1.0


@st.composite
def trees(draw):
    tree = Tree()
    for i in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([None, *(turn.turn_id for turn in tree.turns)]))
        tree.add(
            f"t{i}",
            parent,
            context=draw(st.integers(0, 3)),
            sampled=draw(st.integers(0, 3)),
            status=draw(st.sampled_from(["delivered", "delivered", "delivered", "undelivered", "aborted", "failed"])),
            adopted=draw(st.booleans()),
            auxiliary=draw(st.integers(0, 5)) == 0,
        )
    return tree


@given(trees())
def test_every_action_stands_behind_the_tokens_it_was_conditioned_on_and_is_trained_exactly_once(tree):
    segments = tree.build().segments
    conditioned_on = {
        token: tree.prompts[turn.turn_id] + turn.token_ids[:i]
        for turn in tree.turns
        for i, token in enumerate(turn.token_ids)
    }
    trained = []
    for segment in segments:
        assert len(segment.token_ids) == len(segment.action_mask) == len(segment.logprobs) == len(segment.versions)
        assert segment.trained == any(segment.action_mask) == (segment.untrained_reason is None)
        for i, (token, is_action) in enumerate(zip(segment.token_ids, segment.action_mask, strict=True)):
            if is_action:
                assert segment.token_ids[:i] == conditioned_on[token]
                assert segment.logprobs[i] == -float(token)
                trained.append(token)
    expected = [
        token
        for turn in tree.turns
        if turn.status == "delivered" and turn.adopted and not turn.auxiliary
        for token in turn.token_ids
    ]
    assert sorted(trained) == sorted(expected)


@given(trees())
def test_every_sampled_token_is_an_action_or_counted_under_a_reason(tree):
    trajectory = tree.build()
    counters = trajectory.counters
    untrained = sum(n for name, n in counters.items() if name.startswith("untrained_tokens."))
    num_actions = sum(sum(segment.action_mask) for segment in trajectory.segments)
    assert num_actions + untrained == sum(len(turn.token_ids) for turn in tree.turns)
    roots = sum(n for name, n in counters.items() if name.startswith("opened_by."))
    assert roots + counters.get("forks", 0) == counters["segments"] == len(trajectory.segments)


@given(trees())
def test_no_segment_of_a_rejected_leaf_is_trained_when_an_accepted_leaf_shares_all_its_trained_turns(tree):
    trajectory = tree.build()
    by_id = {turn.turn_id: turn for turn in tree.turns}

    def accepted(turn_id):
        turn = by_id[turn_id]
        return turn.status == "delivered" and turn.adopted and not turn.auxiliary

    covered = {t for s in trajectory.segments if accepted(s.turn_ids[-1]) for t in s.turn_ids}
    for segment in trajectory.segments:
        if not accepted(segment.turn_ids[-1]) and all(t in covered for t in segment.turn_ids if accepted(t)):
            assert not segment.trained

"""The sampling seed of each call: made of its place in a session that has one, the same in every run."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import subprocess
import sys

import pytest

from molt.agents.protocol import SamplingParams
from molt.train.gateway.seeds import seed_of

from .conftest import Caller

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "hi"}]
MORE = {"role": "user", "content": "go on"}


@pytest.fixture
def seeded(bench):
    def open_one(seed=5, policy="enforce"):
        session, key = bench.sessions.open(sampling=SamplingParams(), policy=policy, seed=seed)
        url = f"{bench.url}/s/{session.session_id}"
        openai = bench.open().openai.copy(base_url=url + "/v1", api_key=key)
        return Caller(session, key, url, openai, None, bench.http)

    return open_one


async def ask(caller, messages, **wishes):
    """One call; the conversation with its first reply."""
    answer = await caller.openai.chat.completions.create(model="m", messages=messages, **wishes)
    return [*messages, answer.choices[0].message.model_dump(exclude_none=True)]


def seeds(caller):
    return [turn.sampling["seed"] for turn in caller.turns]


async def conversation(caller):
    """Two turns, a fork of the second, and a branch of its own."""
    first = await ask(caller, USER)
    await ask(caller, [*first, MORE])
    await ask(caller, [*first, {"role": "user", "content": "instead"}])
    await ask(caller, [{"role": "user", "content": "other"}])
    return seeds(caller)


async def test_a_session_that_does_the_same_draws_the_same(seeded):
    first = await conversation(seeded())
    assert first == await conversation(seeded())
    assert len(set(first)) == 4
    assert all(0 <= seed < 2**63 for seed in first)


async def test_another_session_draws_something_else(seeded):
    assert not set(await conversation(seeded(5))) & set(await conversation(seeded(6)))


async def test_a_seed_is_that_of_the_branch_the_depth_and_the_number_there(seeded):
    root = seed_of(5, 1)
    assert await conversation(seeded()) == [root, seed_of(root, 1), seed_of(root, 2), seed_of(5, 2)]


async def test_what_other_branches_do_meanwhile_does_not_matter(seeded):
    plain, busy = seeded(), seeded()
    first = await ask(plain, USER)
    await ask(plain, [*first, MORE])
    first = await ask(busy, USER)
    await ask(busy, [{"role": "user", "content": "a sub-agent"}])
    await ask(busy, [*first, MORE])
    assert seeds(busy)[::2] == seeds(plain)


async def test_samples_of_one_prompt_differ(seeded):
    caller = seeded()
    await ask(caller, USER, n=3)
    await ask(caller, USER)
    assert sorted(seeds(caller)) == sorted(seed_of(5, number) for number in (1, 2, 3, 4))


async def test_a_resend_that_is_given_the_earlier_reply_draws_nothing(seeded):
    caller = seeded()
    body = {"messages": USER}
    await caller.post("/v1/chat/completions", body, **{"idempotency-key": "once"})
    await caller.post("/v1/chat/completions", body, **{"idempotency-key": "once"})
    await ask(caller, [MORE])
    assert seeds(caller) == [seed_of(5, 1), seed_of(5, 2)]


@pytest.mark.parametrize(("policy", "used"), [("enforce", seed_of(5, 1)), ("default", 4), ("client", 4)])
async def test_the_clients_own_seed_wins_where_the_sampling_is_the_clients(seeded, policy, used):
    caller = seeded(policy=policy)
    first = await ask(caller, USER, seed=4)
    await ask(caller, [*first, MORE])
    assert seeds(caller) == [used, seed_of(seed_of(5, 1), 1)]


async def test_a_session_without_a_seed_leaves_the_draw_to_the_engine(seeded):
    caller = seeded(seed=None)
    assert await conversation(caller) == [None] * 4


async def test_the_engine_is_given_the_seed(bench, seeded):
    given, generate = [], bench.scripted.generate

    async def watched(request):
        given.append(request.sampling.seed)
        return await generate(request)

    bench.scripted.generate = watched
    await ask(seeded(), USER)
    assert given == [seed_of(5, 1)]


async def test_a_seed_depends_on_every_part_and_on_their_order():
    made = [seed_of(*parts) for parts in [(1, 2), (2, 1), (12,), (1, "2"), ("1", 2), (1, 2, 0), ("1, 2",)]]
    assert len(set(made)) == len(made)


async def test_a_seed_is_the_same_in_another_process():
    code = "from molt.train.gateway.seeds import seed_of; print(seed_of(0, 'train', 17, 3, 1))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: ASYNC221
    assert int(result.stdout) == seed_of(0, "train", 17, 3, 1)

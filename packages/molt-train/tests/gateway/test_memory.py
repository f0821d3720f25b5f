"""What a served process frees without its collector of cyclic garbage, which hardly ever runs there."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import gc
import weakref

import pytest

from .replies import CALCULATOR, call

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_forgotten_session_is_freed_at_once(bench, no_collector, stream):
    bench.serve({"text": "<think>\nhm\n</think>\n\nso " + call('{"a":1}')})
    session, key = bench.sessions.open(sampling=bench.open().session.sampling, policy="client")
    url, session_id, freed = f"{bench.url}/s/{session.session_id}", session.session_id, weakref.ref(session)
    del session
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "tools": [CALCULATOR]},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 99},
        "/v1/responses": {"input": "hi"},
        "/v1/completions": {"prompt": "hi"},
    }
    for route, body in bodies.items():
        headers = {"authorization": f"Bearer {key}"}
        assert (await bench.http.post(url + route, json=body | {"stream": stream}, headers=headers)).status_code == 200
        refused = await bench.http.post(url + route, json=body | {"max_tokens": "no"}, headers=headers)
        assert refused.status_code in (200, 400)
    await bench.sessions.close(session_id)
    bench.sessions.forget(session_id)
    assert freed() is None, gc.get_referrers(freed())

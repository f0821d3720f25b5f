"""Payloads in a real object store: they outlive who made them, go with their references, and are missed when lost."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(180)

PROGRAM = """
import json, sys, time
from pathlib import Path
import numpy as np
from molt.train.config import Config
from molt.train.controller.run_folder import RunFolder
from molt.train.launch.environment import ray as ray_of

def payload(number, size=10):
    ids, versions = np.full(size, number, np.int32), np.zeros(size, np.int32)
    return Payload(
        token_ids=ids, action_mask=np.ones(size, bool), logprobs=np.zeros(size, np.float32), versions=versions
    )

with ray_of(Config(), RunFolder(Path(sys.argv[1]))):
    import ray
    from ray._private.internal_api import node_stats
    from molt.train.cluster.payloads import RayPayloadStore, start_keepers
    from molt.train.errors import PayloadLostError
    from molt.train.records.experience import Experience, Payload

    class Process:
        def produce(self, store, number):
            return Experience.offload(payload(number), store, segment_id="s", rollout_id="r", group_id="g")

        def put_alone(self):
            return [ray.put(payload(3))]

        def total(self, experience, store):
            return int(experience.reload(store).token_ids.sum())

    def start():
        return ray.remote(Process).options(num_cpus=0).remote()

    found, store = {}, RayPayloadStore(start_keepers())
    producer, rank = start(), start()
    own = Experience.offload(payload(1), store, segment_id="s", rollout_id="r", group_id="g")
    made = ray.get(producer.produce.remote(store, 2))
    (orphan,) = ray.get(producer.put_alone.remote())
    ray.kill(producer)
    time.sleep(1.0)
    found["reloaded"] = [ray.get(rank.total.remote(e, store)) for e in (own, made)]
    try:
        store.get(orphan)
    except PayloadLostError as error:
        found["lost"] = str(error)

    def used():
        (node,) = ray.nodes()
        stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
        return stats.store_stats.object_store_bytes_used

    size = 200_000  # tokens, of 13 bytes each
    window = [
        Experience.offload(payload(i, size), store, segment_id=str(i), rollout_id="r", group_id="g") for i in range(40)
    ]
    ray.get([rank.total.remote(e, store) for e in window])
    deadline = time.monotonic() + 20
    while used() < 40 * 13 * size and time.monotonic() < deadline:
        time.sleep(0.1)
    found["held"] = used()
    del window
    while used() > 13 * size and time.monotonic() < deadline + 20:
        time.sleep(0.1)
    found["left"] = used()
    print(json.dumps(found))
"""


def test_payloads_outlive_their_producer_and_go_with_their_references(tmp_path):
    # In a process of its own: Ray reads its token once a process.
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["reloaded"] == [10, 20]
    assert "gone from the object store: OwnerDiedError" in found["lost"]
    assert found["held"] >= 40 * 13 * 200_000
    assert found["left"] < 13 * 200_000

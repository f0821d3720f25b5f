"""The ledger's tables, and how its file is opened.

Rows of `results`, `recordings`, `windows` and `events` are only ever added; those of `groups`, `rollouts`, `leases` and
`sessions` move forward through their states. What a recording holds is in the payload files (`payloads.py`).

The file is in WAL mode: what a transaction committed survives the death of the process at any point. The writer makes
the checkpoints itself, so that nothing gets into the main file that names bytes of a payload file which are not on
disk yet. `docs/ledger.md` says what survives what.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from molt.train.errors import ConfigError

SCHEMA_VERSION = 2

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE groups (
    seq INTEGER PRIMARY KEY,
    group_id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    task BLOB NOT NULL,           -- the Task, JSON
    size INTEGER NOT NULL,
    position INTEGER,
    key TEXT,
    state TEXT NOT NULL,
    reason TEXT,
    ready_order INTEGER,          -- the result that completed it
    step INTEGER
);
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_by_position ON groups (position) WHERE kind = 'train';

CREATE TABLE rollouts (
    rollout_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL,
    member INTEGER NOT NULL,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    failures INTEGER NOT NULL,
    result_id INTEGER             -- the one result that counts
) WITHOUT ROWID;
CREATE INDEX rollouts_by_group ON rollouts (group_id);
CREATE INDEX rollouts_leased ON rollouts (rollout_id) WHERE state = 'leased';

CREATE TABLE leases (
    lease_id TEXT PRIMARY KEY,
    rollout_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    worker_id TEXT NOT NULL,
    session_id TEXT,
    state TEXT NOT NULL,
    granted REAL NOT NULL,
    ended REAL
) WITHOUT ROWID;
CREATE INDEX leases_granted ON leases (lease_id) WHERE state = 'granted';

CREATE TABLE results (
    result_id INTEGER PRIMARY KEY,
    lease_id TEXT,
    rollout_id TEXT,
    attempt INTEGER NOT NULL,
    counted INTEGER NOT NULL,
    reason TEXT,
    outcome TEXT NOT NULL,
    reward REAL,
    score REAL,
    error TEXT,
    info BLOB NOT NULL,           -- JSON
    answer BLOB,                  -- JSON
    recording_id INTEGER,
    time REAL NOT NULL
);
CREATE INDEX results_lost ON results (rollout_id) WHERE outcome = 'infrastructure';

CREATE TABLE recordings (
    recording_id INTEGER PRIMARY KEY,
    session_id TEXT NOT NULL,
    delivered_fraction REAL NOT NULL,
    counters BLOB NOT NULL,       -- JSON
    file INTEGER NOT NULL,        -- payloads/NNNNNN.bin
    offset INTEGER NOT NULL,      -- of the record's head
    length INTEGER NOT NULL,      -- of what follows the head
    crc INTEGER NOT NULL,
    time REAL NOT NULL
);
CREATE INDEX recordings_by_session ON recordings (session_id);

CREATE TABLE windows (
    step INTEGER PRIMARY KEY,
    policy_version INTEGER NOT NULL,
    group_ids BLOB NOT NULL       -- JSON, in the window's order
);

CREATE TABLE sessions (           -- those that no worker drives
    session_id TEXT PRIMARY KEY,
    key TEXT,                     -- of the group
    task BLOB,                    -- the Task, JSON
    metadata BLOB NOT NULL,       -- JSON
    state TEXT NOT NULL,
    opened REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX sessions_live ON sessions (opened) WHERE state IN ('open', 'idle');

CREATE TABLE quarantine (
    task_id TEXT PRIMARY KEY,
    errors BLOB NOT NULL          -- JSON
) WITHOUT ROWID;

CREATE TABLE grades (             -- outcomes given later, by `regrade`
    name TEXT NOT NULL,
    rollout_id TEXT NOT NULL,
    outcome BLOB NOT NULL,        -- JSON
    PRIMARY KEY (name, rollout_id)
) WITHOUT ROWID;

CREATE TABLE events (
    event_id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    kind TEXT NOT NULL,
    detail BLOB NOT NULL          -- JSON
);
"""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the ledger at `path` in autocommit mode, making it when there is none.

    Raises:
        ConfigError: the file is no ledger, or one of another schema version.
    """
    db = sqlite3.connect(path, isolation_level=None)
    with _closed_on_error(db, path):
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            version = f"INSERT INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}');"
            db.executescript(f"BEGIN; {_TABLES} {version} COMMIT;")
        _check_version(db, path)
    return db


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open an existing ledger, also one that another process is writing.

    Raises:
        ConfigError: the file is missing, is no ledger, or is one of another schema version.
    """
    if not path.is_file():
        raise ConfigError(f"ledger {str(path)!r} does not exist; give the folder of a run that has started")
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    with _closed_on_error(db, path):
        _check_version(db, path)
    return db


@contextmanager
def _closed_on_error(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        db.close()
        raise ConfigError(f"ledger {str(path)!r} cannot be opened: {error}") from None
    except ConfigError:
        db.close()
        raise


def _check_version(db: sqlite3.Connection, path: Path) -> None:
    (found,) = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone() or ("none",)
    if found != str(SCHEMA_VERSION):
        raise ConfigError(f"ledger {str(path)!r} has schema version {found}, not {SCHEMA_VERSION}; give a new run.dir")

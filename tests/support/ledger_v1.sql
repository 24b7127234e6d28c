-- A ledger of schema 1, as a coordinator of 0.1.0 left it: one model with a commit, an update that went go and rolled,
-- another model with a commit and one that failed. The tables are those of schema 1's schema.sql, word for word.
PRAGMA application_id = 0x57504C31;
PRAGMA user_version = 1;

-- The coordinator's ledger. All numbers only grow; nothing is updated but an update's fate and a model's latest.
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;

-- The latest lease of each model.
CREATE TABLE leases (
    model TEXT PRIMARY KEY,
    term INTEGER NOT NULL CHECK (term > 0),
    trainer_id TEXT NOT NULL,
    incarnation TEXT NOT NULL
) STRICT;

-- Commits of each model so far.
CREATE TABLE models (model TEXT PRIMARY KEY, ordinal INTEGER NOT NULL) STRICT;

-- What the fleet serves: one version a model, two while rolling.
CREATE TABLE served (
    model TEXT NOT NULL,
    term INTEGER NOT NULL,
    number INTEGER NOT NULL,
    PRIMARY KEY (model, number)
) STRICT;

-- Engines that a restarted coordinator waits for.
CREATE TABLE engines (engine_id TEXT PRIMARY KEY, model TEXT NOT NULL) STRICT;

-- Every number that was ever given. phase: preparing, go, committed, degraded, failed.
CREATE TABLE updates (
    number INTEGER PRIMARY KEY,
    update_id TEXT NOT NULL UNIQUE,
    request_id TEXT NOT NULL,
    model TEXT NOT NULL,
    term INTEGER NOT NULL,
    step INTEGER,
    phase TEXT NOT NULL,
    rolled INTEGER NOT NULL DEFAULT 0,
    cause TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX open_updates ON updates (phase) WHERE phase IN ('preparing', 'go');

CREATE TABLE update_engines (
    update_id TEXT NOT NULL,
    engine_id TEXT NOT NULL,
    incarnation TEXT NOT NULL,
    required INTEGER NOT NULL,
    PRIMARY KEY (update_id, engine_id)
) STRICT;

INSERT INTO meta VALUES ('run_id', 'run'), ('coordinator_term', '4');
INSERT INTO leases VALUES ('policy', 3, 't0', 't0-life'), ('critic', 1, 't1', 't1-life');
INSERT INTO models VALUES ('policy', 2), ('critic', 1);
INSERT INTO served VALUES ('policy', 2, 1), ('policy', 3, 4), ('critic', 1, 2);
INSERT INTO engines VALUES ('e0', 'policy'), ('e1', 'policy'), ('e2', 'critic');
INSERT INTO updates VALUES
    (1, 'u1', 'r1', 'policy', 2, 10, 'committed', 0, ''),
    (2, 'u2', 'r2', 'critic', 1, NULL, 'degraded', 0, 'e2 lost'),
    (3, 'u3', 'r3', 'critic', 1, 12, 'failed', 0, 'e2 silent'),
    (4, 'u4', 'r4', 'policy', 3, 11, 'go', 1, '');
INSERT INTO update_engines VALUES
    ('u1', 'e0', 'i0', 1), ('u2', 'e2', 'i2', 1), ('u3', 'e2', 'i2', 1), ('u4', 'e1', 'i1', 1), ('u4', 'e0', 'i0', 0);

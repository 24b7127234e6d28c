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

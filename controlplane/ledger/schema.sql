-- The coordinator's ledger, schema 3. Numbers and terms only grow; nothing is updated but an update's fate and a
-- model's latest. Times are Unix seconds. A digest of no bytes was not told.
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

-- What the fleet serves: one version a model, two while rolling. Number 0: as the engines loaded it (frozen).
CREATE TABLE served (
    model TEXT NOT NULL,
    term INTEGER NOT NULL,
    number INTEGER NOT NULL,
    content_digest BLOB NOT NULL DEFAULT x'',
    PRIMARY KEY (model, number)
) STRICT;

-- Engines that a restarted coordinator waits for.
CREATE TABLE engines (engine_id TEXT PRIMARY KEY, model TEXT NOT NULL) STRICT;

-- Every layout that an update named. byte_count: the most that an update of it stated, so that of a full one.
CREATE TABLE layouts (
    digest BLOB PRIMARY KEY,
    byte_count INTEGER NOT NULL,
    first_seen_at REAL NOT NULL
) STRICT;

-- Every number that was ever given. phase: preparing, go, committed, degraded, failed. The request was answered at
-- began_at. A time is null where a coordinator of schema 1 wrote the row.
CREATE TABLE updates (
    number INTEGER PRIMARY KEY,
    update_id TEXT NOT NULL UNIQUE,
    request_id TEXT NOT NULL,
    model TEXT NOT NULL,
    term INTEGER NOT NULL,
    step INTEGER,
    phase TEXT NOT NULL,
    rolled INTEGER NOT NULL DEFAULT 0,
    cause TEXT NOT NULL DEFAULT '',
    layout_digest BLOB NOT NULL DEFAULT x'',
    content_digest BLOB NOT NULL DEFAULT x'',
    byte_count INTEGER NOT NULL DEFAULT 0,
    restores_term INTEGER,
    restores_number INTEGER,
    began_at REAL,
    decided_at REAL
) STRICT;
CREATE INDEX open_updates ON updates (phase) WHERE phase IN ('preparing', 'go');
CREATE INDEX began_updates ON updates (began_at);

-- Whom an update was planned for; from `stage` on, what each reported until the decision. lost is null where no
-- outcome was written, stage where the engine never reported this update.
CREATE TABLE update_engines (
    update_id TEXT NOT NULL,
    engine_id TEXT NOT NULL,
    incarnation TEXT NOT NULL,
    required INTEGER NOT NULL,
    grp TEXT NOT NULL DEFAULT '',
    unit TEXT NOT NULL DEFAULT '',
    awaited INTEGER NOT NULL DEFAULT 0,
    stage TEXT,
    lost INTEGER,
    error_reason TEXT NOT NULL DEFAULT '',
    error_message TEXT NOT NULL DEFAULT '',
    content_digest BLOB NOT NULL DEFAULT x'',
    PRIMARY KEY (update_id, engine_id)
) STRICT;

-- Versions in directories that engines can read; a row goes before its directory does.
CREATE TABLE checkpoints (
    model TEXT NOT NULL,
    number INTEGER NOT NULL,
    term INTEGER NOT NULL,
    name TEXT NOT NULL,
    layout_digest BLOB NOT NULL,
    content_digest BLOB NOT NULL,
    tensor_count INTEGER NOT NULL,
    file_count INTEGER NOT NULL,
    byte_count INTEGER NOT NULL,
    kept_at REAL NOT NULL,
    PRIMARY KEY (model, number)
) STRICT;

-- Older copies of the ledger that people accepted. known_number: the highest that this copy had given or given up by
-- then; of the numbers above it, up to `number`, nothing is known, and none of them is given again.
CREATE TABLE floors (
    id INTEGER PRIMARY KEY,
    number INTEGER NOT NULL,
    known_number INTEGER NOT NULL,
    coordinator_term INTEGER NOT NULL,
    accepted_by TEXT NOT NULL,
    accepted_at REAL NOT NULL
) STRICT;

CREATE TABLE floor_terms (
    floor_id INTEGER NOT NULL,
    model TEXT NOT NULL,
    term INTEGER NOT NULL,
    PRIMARY KEY (floor_id, model)
) STRICT;

-- Engines that stay at a version while the fleet moves on, until they are released.
CREATE TABLE kept_engines (
    engine_id TEXT PRIMARY KEY,
    model TEXT NOT NULL,
    term INTEGER NOT NULL,
    number INTEGER NOT NULL,
    content_digest BLOB NOT NULL DEFAULT x'',
    kept_at REAL NOT NULL
) STRICT;

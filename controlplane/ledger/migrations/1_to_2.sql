-- Schema 1 knew neither contents, layouts and outcomes, nor times, checkpoints and floors. What the new columns mean
-- is said in schema.sql; of the rows that are there, they say that nothing was told.
ALTER TABLE served ADD COLUMN content_digest BLOB NOT NULL DEFAULT x'';

CREATE TABLE layouts (
    digest BLOB PRIMARY KEY,
    byte_count INTEGER NOT NULL,
    first_seen_at REAL NOT NULL
) STRICT;

ALTER TABLE updates ADD COLUMN layout_digest BLOB NOT NULL DEFAULT x'';
ALTER TABLE updates ADD COLUMN content_digest BLOB NOT NULL DEFAULT x'';
ALTER TABLE updates ADD COLUMN byte_count INTEGER NOT NULL DEFAULT 0;
ALTER TABLE updates ADD COLUMN restores_term INTEGER;
ALTER TABLE updates ADD COLUMN restores_number INTEGER;
ALTER TABLE updates ADD COLUMN began_at REAL;
ALTER TABLE updates ADD COLUMN decided_at REAL;
CREATE INDEX began_updates ON updates (began_at);

ALTER TABLE update_engines ADD COLUMN grp TEXT NOT NULL DEFAULT '';
ALTER TABLE update_engines ADD COLUMN unit TEXT NOT NULL DEFAULT '';
ALTER TABLE update_engines ADD COLUMN awaited INTEGER NOT NULL DEFAULT 0;
ALTER TABLE update_engines ADD COLUMN stage TEXT;
ALTER TABLE update_engines ADD COLUMN lost INTEGER;
ALTER TABLE update_engines ADD COLUMN error_reason TEXT NOT NULL DEFAULT '';
ALTER TABLE update_engines ADD COLUMN error_message TEXT NOT NULL DEFAULT '';
ALTER TABLE update_engines ADD COLUMN content_digest BLOB NOT NULL DEFAULT x'';

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

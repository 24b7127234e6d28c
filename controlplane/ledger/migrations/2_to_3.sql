-- Schema 2 knew no engines that stay at a version.
CREATE TABLE kept_engines (
    engine_id TEXT PRIMARY KEY,
    model TEXT NOT NULL,
    term INTEGER NOT NULL,
    number INTEGER NOT NULL,
    content_digest BLOB NOT NULL DEFAULT x'',
    kept_at REAL NOT NULL
) STRICT;

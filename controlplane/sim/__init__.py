"""A seeded simulator of the whole fleet around the pure cores; see `world`, `witness`, `runner`."""

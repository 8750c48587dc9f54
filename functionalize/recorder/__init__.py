"""A run of a step as a stream of ops: the dispatch mode, its storage table and checks, patches, live scalars."""

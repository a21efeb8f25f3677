"""Where the time goes: every stage of every step, on every rank, and the files that say so."""

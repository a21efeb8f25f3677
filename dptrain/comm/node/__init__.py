"""What the ranks of a node share: memory, gates, and what each rank does at present."""

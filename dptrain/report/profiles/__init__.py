"""The page of one profile, and its parts, which other pages contain too."""

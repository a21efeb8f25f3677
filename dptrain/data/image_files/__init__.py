"""Image files: which files of a folder are images, and how one becomes 8-bit pixels."""

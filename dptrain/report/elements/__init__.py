"""What pages consist of: the page itself, its plots, tables, numbers and definitions."""

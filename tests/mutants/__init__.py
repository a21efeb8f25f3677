"""Small faults, put into the code one at a time, and the tests that must notice each."""

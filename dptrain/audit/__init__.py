"""How often the intervals of dptrain contain the truth, for simulated noise."""

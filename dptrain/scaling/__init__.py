"""How well the job scales: measured baselines, statistics, efficiencies."""

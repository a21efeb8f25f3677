"""What the studies published, and the verdicts on their claims."""

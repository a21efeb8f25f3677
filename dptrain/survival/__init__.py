"""Jobs that outlive their ranks: `dptrain train --survive`."""

MOST_REPAIRS = 3
"""Silent corruptions after which a further one ends a job: the hardware is faulty."""

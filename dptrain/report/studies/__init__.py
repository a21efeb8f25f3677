"""The pages of scaling studies, sweeps and studies of variants."""

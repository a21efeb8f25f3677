"""Reports of training runs, profiles and studies, and comparisons: one HTML page with plots.

The records (`run_record`, `comparison`, and those of `measure` and `scaling`) are turned into plots
and tables (`*_plots`, `*_tables`), these into a page (`*_page`), and the page into files (`files`).
"""

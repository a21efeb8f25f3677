"""The report of a study or of a profile: one HTML page with plots and tables.

The records are turned into plots and tables (`study_plots`, `profile_plots`, `study_tables`,
`profile_tables`), these into a page (`study_page`, `profile_page`), and the page into files
(`files.write_report`).
"""

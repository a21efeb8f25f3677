"""The report: one page, plots and tables, drawn from records that others have measured.

Data become figures (`study_plots`, `profile_plots`, `study_tables`, `profile_tables`), figures a
page (`study_page`, `profile_page`), and a page files (`files.write_report`).
"""

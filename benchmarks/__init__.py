"""Comparisons of dptrain with other libraries and with what machines can do.

``python -m benchmarks`` lists the subjects. A run of ``cpu`` or ``gpu`` consists of sections. Each
builds the programs of a case (a network, batch size, precision, and number of threads or GPUs) for
dptrain and its peers, checks their results, times them in alternating rounds (`timing.measure`) and
stores a row for each program (`report.Report`). Tables, speedups and targets follow from the rows.
"""

"""Published convolutional classifiers: which of them dptrain reads, trains and exports."""

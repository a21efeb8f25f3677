"""The command line. Commands parse, call one function and print; nothing is computed here."""

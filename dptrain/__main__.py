"""`python -m dptrain` and the `dptrain` command."""

from dptrain.cli.main import main

if __name__ == "__main__":
    main()

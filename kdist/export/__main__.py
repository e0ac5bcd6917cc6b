"""`python -m kdist.export`; see `kdist.cli.export`."""

from kdist.cli.export import main

if __name__ == "__main__":
    main()

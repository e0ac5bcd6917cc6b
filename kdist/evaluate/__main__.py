"""`python -m kdist.evaluate`; see `kdist.cli.evaluate`."""

from kdist.cli.evaluate import main

if __name__ == "__main__":
    main()

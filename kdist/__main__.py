"""`python -m kdist`; see `kdist.cli.main`."""

from kdist.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m kdist`; see `kdist.cli`."""

from kdist.cli import main

if __name__ == "__main__":
    main()

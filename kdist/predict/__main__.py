"""`python -m kdist.predict`; see `kdist.cli.predict`."""

from kdist.cli.predict import main

if __name__ == "__main__":
    main()

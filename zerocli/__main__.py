"""`python -m zerocli` is the same program as `zerocli`."""

from zerocli.entry import main

if __name__ == "__main__":
    main()

"""`python -m ckpttools`."""

from ckpttools.cli import main

if __name__ == "__main__":
    main()

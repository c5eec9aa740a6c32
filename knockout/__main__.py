"""`python -m knockout`."""

from knockout.cli import main

if __name__ == "__main__":
    main()

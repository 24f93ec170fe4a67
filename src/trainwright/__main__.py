"""`python -m trainwright` is the same as the `trainwright` command."""

from trainwright.cli import main

main()

"""Run the command line as `python -m specdec`."""

from specdec.cli import main

main()

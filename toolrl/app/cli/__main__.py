"""`python -m toolrl.app.cli`: the command where its script is not on the path."""

from toolrl.app.cli import main

main()

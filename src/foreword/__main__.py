"""`python -m foreword` is the command `foreword`."""

from foreword.cli import main

main()

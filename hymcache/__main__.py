"""`python -m hymcache` is the command `hymcache`."""

from hymcache.cli import main

main()

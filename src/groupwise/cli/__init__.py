"""The command line: `groupwise COMMAND`. Nothing here imports torch before there is work to do."""

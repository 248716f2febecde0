"""The driver: from model directories to a `.dsmodel` bundle, and the `dsc` command line."""
